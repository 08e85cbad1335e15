"""Out of memory: recognised on every device, and blamed on neither the candidate nor the golden."""

from __future__ import annotations

import gc
import re

import torch

from .printable import text_of

TO_DO = "use smaller sizes in the case, end other programs that use the memory, or choose a device with more of it"
KEPT = 2**28  # bytes of a GPU's memory that a finished case may leave to the next one
_ON_A_CPU = "DefaultCPUAllocator"  # part of the RuntimeError that torch raises on a CPU
# Parts of the RuntimeError that torch raises on a GPU where it cannot ask the driver for the list of processes which
# its text of an out-of-memory error has, as in a container without NVML
_WITHOUT_NVML = ("nvmlInit", "CUDACachingAllocator")
_OF_CUDA = "CUDA error: out of memory"  # part of it where CUDA itself needs memory, as for a kernel's code or stack


class ElsewhereOutOfMemory(torch.OutOfMemoryError):
    """Memory ran out in a candidate's process, whose `wanted` is the text."""


def out_of_memory(error: BaseException) -> bool:
    return (
        of_a_gpu(error)
        or isinstance(error, MemoryError)
        or (isinstance(error, RuntimeError) and _ON_A_CPU in text_of(error))
    )


def of_a_gpu(error: BaseException | None) -> bool:
    """Whether a GPU's memory ran out, which other processes use too: no evidence about the candidate."""
    text = text_of(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and (_OF_CUDA in text or all(part in text for part in _WITHOUT_NVML))
    )


def wanted(error: BaseException) -> str:
    """How much was asked for. torch's own text also lists every process on the GPU."""
    if isinstance(error, ElsewhereOutOfMemory):
        return str(error)
    requested = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
    return f"out of memory{f', {requested[1]} more were needed' if requested else ''}"


def out_of_memory_text(error: BaseException) -> str:
    """How much was asked for and what to do."""
    return f"{wanted(error)}; {TO_DO}"


def release(device: str | torch.device) -> None:
    """Free a GPU's memory before the next case: reference cycles, and what torch's allocator has cached.

    Only if there is much to free: collecting cycles takes 0.19 s (H100's host), as long as a small case.
    """
    if torch.device(device).type == "cuda" and torch.cuda.memory_reserved(device) > KEPT:
        gc.collect()
        torch.cuda.empty_cache()
