"""A pool of pages for large tensors that a layer saves for its backward; later calls reuse them.

Above 32 MiB the C library gets new pages from the system for each tensor and returns them when the tensor is
freed. Faulting them in again took 5 of 36 ms of a forward of 2,048 tokens (DeepSeek-V2-Lite's layer, 16 cores of an
H100's host, 2026-11-24). Idle pages are lent to the system with MADV_FREE: it takes them when it runs short of memory,
and until then writing them costs nothing.
"""

from __future__ import annotations

import math
import mmap
import weakref

import torch
from torch import Tensor

from .packed.memory import HUGE, map_pages

LEAST = 32 << 20  # bytes: glibc itself keeps smaller blocks (DEFAULT_MMAP_THRESHOLD_MAX)
_PURPOSE = "the backward's saved tensors", "use fewer tokens at a time, or activation checkpointing"
_WASTE = 4  # a block may be larger than the request by 1/4


class PagePool:
    """Blocks of whole pages; idle and used blocks together never exceed the most bytes that were in use at once.

    There is no lock, because any thread can drop a tensor at any time, even this one in the middle of `empty`. Shared
    state changes only in atomic steps of a dict and a list.
    """

    def __init__(self) -> None:
        self.idle: list[mmap.mmap] = []  # oldest first
        self.used: dict[int, int] = {}  # id -> bytes of the blocks in use
        self.most = 0  # most bytes in use at once

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous uninitialised tensor; its block returns to the pool when nothing refers to it any more."""
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
                    continue  # another thread has taken it
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
                return  # another thread has emptied the list


_pool = PagePool()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the CPU; large ones come from the pool."""
    if math.prod(shape) * dtype.itemsize < LEAST or not hasattr(mmap, "MADV_FREE"):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return _pool.empty(shape, dtype)
