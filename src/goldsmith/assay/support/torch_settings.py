"""Settings of torch while a golden runs: default dtype, a fixed order of sums on a GPU, number of threads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_SMALL = 2**17  # up to this many input elements in all, one thread is faster than two


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside the context, torch.ones(3) and the like create `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def in_one_order(leaves: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which torch on a GPU adds in a fixed order where it can, instead of with atomics (scatter_add)."""
    mode: Any = torch.utils.deterministic  # Any: a module whose class defines this attribute as a property
    filled = mode.fill_uninitialized_memory
    if torch.are_deterministic_algorithms_enabled() or not any(t.is_cuda for t in leaves.values()):
        yield
        return
    with warnings.catch_warnings():
        # about operators without a deterministic version; self_check notices those
        warnings.filterwarnings("ignore", message=".*determinis.*")
        torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms imports torch's compiler: a second
        mode.fill_uninitialized_memory = False  # NaN in elements that nobody wrote would repeat
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode("default")
            mode.fill_uninitialized_memory = filled


@contextmanager
def threads_for(leaves: Mapping[str, Tensor]) -> Iterator[None]:
    """One intra-op thread for small work: on two busy cores the barrier of a 10 us loop cost up to 5 ms."""
    before = torch.get_num_threads()
    small = sum(t.numel() for t in leaves.values()) <= _SMALL
    if small and before > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if small and before > 1:
            torch.set_num_threads(before)
