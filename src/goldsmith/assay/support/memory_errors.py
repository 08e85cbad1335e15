"""Memory that the machine does not have: says nothing of the candidate, and nothing of the golden."""

from __future__ import annotations

import gc
import re

import torch

TO_DO = "give the case smaller sizes, end what else uses the memory, or take a device with more of it"
_ON_A_CPU = "DefaultCPUAllocator"  # in the text of the RuntimeError that torch raises there


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _ON_A_CPU in str(error)
    )


def told(error: BaseException) -> str:
    """What was too much, and what to do. torch's own text goes on with every process on the card."""
    wanted = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
    return f"out of memory{f', {wanted[1]} more were wanted' if wanted else ''}; {TO_DO}"


def release(device: str | torch.device) -> None:
    """Give a card's memory back before the next case: tensors in reference cycles, and what torch keeps for later."""
    if torch.device(device).type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
