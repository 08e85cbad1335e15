"""Large memory that a layer saves for its backward, used again by later calls.

Beyond 32 MiB the C library takes fresh pages from the system for every tensor and gives them back with it. To fault
them in anew took 5 of 36 ms of a forward of 2,048 tokens (DeepSeek-V2-Lite's layer, 16 cores of an H100's host,
2026-11-24). What is idle here is lent to the system: it takes it when it runs short, and writing it again costs
nothing until then.
"""

from __future__ import annotations

import math
import mmap
import weakref

import torch
from torch import Tensor

from .packed.memory import HUGE, map_pages

LEAST = 32 << 20  # bytes: the most that glibc keeps by itself (DEFAULT_MMAP_THRESHOLD_MAX)
_PURPOSE = "what the backward needs", "fewer tokens at a time, or activation checkpointing, need less"
_WASTE = 4  # a block may be larger than what is asked for by a quarter


class PagePool:
    """Blocks of whole pages: what is idle and in use together is never more than has been in use at once.

    No lock, for what drops a tensor may be any thread at any time, this one in the middle of `empty` included: what
    is shared changes in single steps of a dict and a list.
    """

    def __init__(self) -> None:
        self.idle: list[mmap.mmap] = []  # the one given back first is first
        self.used: dict[int, int] = {}  # the sizes of the others
        self.most = 0  # bytes in use at once

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, contiguous; its block comes back when nothing refers to it any more."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        pages = self._fitting(size) or map_pages(-(-size // HUGE) * HUGE, *_PURPOSE)
        view = memoryview(pages)
        tensor = torch.frombuffer(view, dtype=dtype, count=count).view(shape)
        weakref.finalize(view, self._take_back, pages).atexit = False
        self.used[id(pages)] = len(pages)
        self._trim()
        return tensor

    def _fitting(self, size: int) -> mmap.mmap | None:
        for pages in sorted(self.idle, key=len):
            if size <= len(pages) <= size + size // _WASTE:
                try:
                    self.idle.remove(pages)
                except ValueError:
                    continue  # another thread was quicker
                return pages
        return None

    def _take_back(self, pages: mmap.mmap) -> None:
        pages.madvise(mmap.MADV_FREE)
        self.used.pop(id(pages), None)
        self.idle.append(pages)

    def _trim(self) -> None:
        in_use = sum(list(self.used.values()))
        self.most = max(self.most, in_use)
        while self.idle and in_use + sum(map(len, list(self.idle))) > self.most:
            try:
                self.idle.pop(0)
            except IndexError:
                return  # another thread was quicker


_pool = PagePool()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the CPU; a large one in memory that was used before."""
    if math.prod(shape) * dtype.itemsize < LEAST or not hasattr(mmap, "MADV_FREE"):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return _pool.empty(shape, dtype)
