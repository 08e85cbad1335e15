"""One copy of packed experts for all ranks of a machine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..experts import PackedExperts
from ..experts.packed.memory import put_slices

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def shared_base(make: Callable[[], PackedExperts], group: ProcessGroup) -> PackedExperts:
    """The packed experts that the group's first rank makes, in memory that all its ranks map

    make    called on the first rank alone; its result is copied once, blob by blob, into a file in memory (memfd) that
            the others map, and then freed
    group   the ranks of one machine that use gloo, such as `machine_group()`; a collective of all of them

    The bytes exist once on the machine, however many ranks compute with them. Slices stay on the NUMA nodes that the
    copy puts them on. The memory is free when the last rank has dropped its experts, also after a kill. Raises what
    `make` raises, on all ranks, and OSError if a rank cannot map the file, because it runs on another machine.
    """
    from torch import distributed

    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(
            f"distributed.shared_base: group is of type {type(group).__name__}, expected the ProcessGroup of one "
            "machine's ranks: distributed.machine_group()"
        )
    base: PackedExperts | None = None
    message: list[Any] = [None]
    files: list[int] = []
    if group.rank() == 0:
        try:
            base = make()
            if not isinstance(base, PackedExperts):
                raise TypeError(
                    f"distributed.shared_base: make() returned a {type(base).__name__}, expected a PackedExperts"
                )
            message[0] = _published(base, files)
        except Exception as error:  # noqa: BLE001  raised again below, and named on the other ranks
            message[0] = error
    distributed.broadcast_object_list(message, group=group, group_src=0)
    if isinstance(message[0], Exception):
        raise message[0]
    try:
        own = _mapped(message[0])
    finally:
        distributed.barrier(group=group)  # a mapping keeps the file alive when its maker has closed it
        for file in files:
            os.close(file)
    return own


def machine_group() -> ProcessGroup:
    """A gloo group of the ranks that run on this machine; a collective of all ranks."""
    from torch import distributed

    here = _machine()
    machines: list[object] = [None] * distributed.get_world_size()
    distributed.all_gather_object(machines, here)
    groups = {}
    for machine in dict.fromkeys(machines):  # every rank takes part in making every group
        ranks = [rank for rank, theirs in enumerate(machines) if theirs == machine]
        groups[machine] = distributed.new_group(ranks, backend="gloo")
    return groups[here]


def _machine() -> tuple[str, str]:
    """Equal for processes that see each other in /proc."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"{os.uname().nodename}", str(os.getpid())


def _published(base: PackedExperts, files: list[int]) -> tuple[object, ...]:
    """How other processes rebuild the base; the blobs' files are added to `files`."""
    reduced: Any = base.__reduce__()
    restore, (text, gate_up, down, *rest) = reduced
    places = []
    for which, blob in (("gate_up", gate_up), ("down", down))[: 1 if gate_up is down else 2]:
        file = os.memfd_create("goldsmith-experts")
        files.append(file)
        size = blob.numel()
        os.truncate(file, max(1, size))
        if size:
            pages = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
            put_slices(pages, base.layout, which, base.nodes)
            pages.copy_(blob)
        places.append((f"/proc/{os.getpid()}/fd/{file}", size))
    return restore, text, places, rest


def _mapped(message: tuple[Any, ...]) -> PackedExperts:
    restore, text, places, rest = message
    blobs = [_pages(path, size) for path, size in places]
    return restore(text, blobs[0], blobs[-1], *rest)


def _pages(path: str, size: int) -> Tensor:
    if size == 0:
        return torch.zeros(0, dtype=torch.uint8)
    file = os.open(path, os.O_RDWR)
    try:  # private: no rank can change what the others read, and pages that nobody writes exist once
        pages = mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(file)
    return torch.frombuffer(pages, dtype=torch.uint8)
