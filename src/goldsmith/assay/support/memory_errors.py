"""Out of memory: recognised on every device, and blamed on neither the candidate nor the golden."""

from __future__ import annotations

import gc
import re

import torch

TO_DO = "use smaller sizes in the case, end other programs that use the memory, or choose a device with more of it"
_ON_A_CPU = "DefaultCPUAllocator"  # part of the RuntimeError that torch raises on a CPU


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _ON_A_CPU in str(error)
    )


def out_of_memory_text(error: BaseException) -> str:
    """How much was asked for and what to do. torch's own text also lists every process on the GPU."""
    requested = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
    return f"out of memory{f', {requested[1]} more were needed' if requested else ''}; {TO_DO}"


def release(device: str | torch.device) -> None:
    """Free a GPU's memory before the next case: reference cycles, and what torch's allocator has cached."""
    if torch.device(device).type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
