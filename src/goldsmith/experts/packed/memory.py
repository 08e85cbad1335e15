"""Memory for packed weights: whole pages, each slice on the NUMA node that will read it."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ...core.processors import nodes_of_machine, processors_of
from .layout import Layout

HUGE = 2 << 20  # bytes of a page of the larger kind, asked for from two of them on: 4 KiB by 4 KiB takes longer
_MBIND = {"x86_64": 237, "aarch64": 235}  # the system call's number; libc has no function for it
_PREFERRED = 1  # MPOL_PREFERRED: on that node while it has room, rather than out of memory


@contextmanager
def frozen() -> Iterator[None]:
    """No gradients, and no inference tensors either, which autograd could not keep for a backward later."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def allocate(layout: Layout, which: str, nodes: Sequence[int] = ()) -> Tensor:
    """Zero bytes for a blob, page-aligned, not touched yet; slice p on node nodes[p] if `nodes` are given."""
    size = layout.nbytes(which)
    blob = empty_pages(size)
    if nodes:
        places = layout.matrices(which)
        ends = [place.offset for place in places[1:]] + [size]
        for place, end, node in zip(places, ends, nodes):
            put_on_node(blob[place.offset : end], node)
    return blob


def empty_pages(size: int) -> Tensor:
    """`size` zero bytes in pages of their own, which cost nothing before they are written and go back when freed."""
    if size == 0 or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(size, dtype=torch.uint8, device="cpu")
    pages = map_pages(size, "packed weights", "a format with fewer bytes per weight is int4 or mxfp4")
    return torch.frombuffer(pages, dtype=torch.uint8)


def map_pages(size: int, purpose: str, advice: str) -> mmap.mmap:
    """`size` bytes that are the process's own; raises MemoryError, with what they were for and what needs less."""
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        gives = f"the system gives no {size / 1e9:.1f} GB for {purpose} ({error})"
        raise MemoryError(f"goldsmith.experts: {gives}; {advice}") from error
    if size >= 2 * HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages: small ones do
    return pages


def give_back(pages: Tensor) -> None:
    """Whole pages inside a part of `empty_pages`, whose numbers nobody needs any more, back to the system."""
    begin = -(-pages.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (pages.data_ptr() + pages.numel() - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0 and platform.system() == "Linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def spread(partitions: int) -> tuple[int, ...]:
    """A node for each slice: neighbours side by side, as evenly as it goes."""
    nodes = nodes_of_machine()
    return tuple(nodes[p * len(nodes) // partitions] for p in range(partitions))


def put_on_node(pages: Tensor, node: int) -> str:
    """Have untouched `pages` lie on `node`; returns how: "bound", or "touched" by a thread that runs there."""
    if pages.numel() == 0 or _bind(pages, node):
        return "bound"
    toucher = threading.Thread(target=_touch, args=(pages, processors_of(node)))
    toucher.start()
    toucher.join()
    return "touched"


def _bind(pages: Tensor, node: int) -> bool:
    number = _MBIND.get(platform.machine())
    if number is None or platform.system() != "Linux" or pages.data_ptr() % mmap.PAGESIZE:
        return False
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    arguments = (pages.data_ptr(), pages.numel(), _PREFERRED, ctypes.addressof(mask), len(mask) * 64 + 1, 0)
    return call(*(ctypes.c_ulong(value) for value in (number, *arguments))) == 0


def _touch(pages: Tensor, processors: list[int]) -> None:
    """Write every page from this thread, on one of `processors` where the system lets it move there."""
    if processors and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, processors)  # 0 is the calling thread, which ends after this
        except OSError:
            pass  # a container that has none of the node's processors: the pages lie where they may
    ctypes.memset(pages.data_ptr(), 0, pages.numel())
