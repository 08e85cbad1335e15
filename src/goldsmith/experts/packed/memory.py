"""Memory for packed weights: whole pages, with each slice on the NUMA node that will read it."""

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

HUGE = 2 << 20  # bytes of a huge page, requested for two or more of them: faulting 4 KiB pages takes longer
_MBIND = {"x86_64": 237, "aarch64": 235}  # the system call's number; libc has no function for it
_PREFERRED = 1  # MPOL_PREFERRED: use another node if this one is full, instead of running out of memory


@contextmanager
def frozen() -> Iterator[None]:
    """Disable gradients without inference mode, whose tensors autograd cannot save for a later backward."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def allocate(layout: Layout, which: str, nodes: Sequence[int] = ()) -> Tensor:
    """Zeroed, page-aligned bytes for a blob, not touched yet; slice p goes to node nodes[p] if `nodes` is not empty."""
    blob = empty_pages(layout.nbytes(which))
    put_slices(blob, layout, which, nodes)
    return blob


def put_slices(blob: Tensor, layout: Layout, which: str, nodes: Sequence[int]) -> None:
    """Place the untouched pages of slice p on node nodes[p]; nothing without nodes."""
    if nodes:
        places = layout.matrices(which)
        ends = [place.offset for place in places[1:]] + [blob.numel()]
        for place, end, node in zip(places, ends, nodes):
            put_on_node(blob[place.offset : end], node)


def empty_pages(size: int) -> Tensor:
    """`size` zero bytes in separate pages: they cost nothing until written, and return to the system when freed."""
    if size == 0 or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(size, dtype=torch.uint8, device="cpu")
    pages = map_pages(size, "packed weights", "int4 and mxfp4 take fewer bytes per weight")
    return torch.frombuffer(pages, dtype=torch.uint8)


def map_pages(size: int, purpose: str, advice: str) -> mmap.mmap:
    """`size` bytes of private anonymous memory; the MemoryError names the purpose and the advice."""
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        problem = f"the system could not provide {size / 1e9:.1f} GB for {purpose} ({error})"
        raise MemoryError(f"goldsmith.experts: {problem}; {advice}") from error
    if size >= 2 * HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages uses small ones
    return pages


def give_back(pages: Tensor) -> None:
    """Return the whole pages inside a part of `empty_pages` to the system; their contents are lost."""
    begin = -(-pages.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (pages.data_ptr() + pages.numel() - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0 and platform.system() == "Linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def spread(partitions: int) -> tuple[int, ...]:
    """The node of each slice: neighbouring slices share a node, as evenly as possible."""
    nodes = nodes_of_machine()
    return tuple(nodes[p * len(nodes) // partitions] for p in range(partitions))


def put_on_node(pages: Tensor, node: int) -> str:
    """Place untouched `pages` on `node`; returns "bound", or "touched" if a thread on that node wrote them first."""
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
    """Write every page from this thread, after moving it to `processors` if the system allows that."""
    if processors and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, processors)  # 0 is the calling thread, which ends after this function
        except OSError:
            pass  # a container without the node's processors: the pages land on another node
    ctypes.memset(pages.data_ptr(), 0, pages.numel())
