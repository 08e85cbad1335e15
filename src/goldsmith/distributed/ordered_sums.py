"""Sums over ranks that repeat bit for bit: the addends are added in the order of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BUCKET = 1 << 22  # numbers that are exchanged at once: 16 MiB of float32


def sum_in_rank_order(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> None:
    """t = t of rank 0 + t of rank 1 + ..., in place, for tensors on one device; all ranks get equal bits

    Every rank receives one part of each bucket from all ranks, adds it in float32 or better, and sends the sum to all:
    2 (world - 1) / world times the bytes, like a ring. The order does not depend on the library's algorithm, network or
    bucket, so a run repeats for an equal number of ranks. Works with gloo on CPUs and with NCCL; CPU tensors of a group
    that has only NCCL go through a gloo group of the same ranks, which the first such call makes. Raises ValueError, on
    all ranks, if their lists of sizes and dtypes differ.
    """
    from torch import distributed

    # the older name warns since torch 2.13, and 2.11 has no other
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    world = distributed.get_world_size(group)
    if world == 1:
        return
    agreed("distributed.sum_in_rank_order", [f"{list(t.shape)} {t.dtype}" for t in tensors], group)
    if not tensors:
        return
    tensors = [t.detach() for t in tensors]
    group = group_for(tensors[0].device.type, group)
    dense = [t.contiguous() for t in tensors]
    for pieces in _buckets([t.view(-1) for t in dense]):
        size = sum(map(len, pieces))
        dtype = torch.promote_types(pieces[0].dtype, torch.float32)
        sent = torch.zeros(-(-size // world) * world, dtype=dtype, device=pieces[0].device)
        torch.cat([piece.to(dtype) for piece in pieces], out=sent[:size])
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=group)
        parts = received.view(world, -1)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        gather(sent, total, group=group)
        for piece, summed in zip(pieces, sent[:size].split([len(p) for p in pieces]), strict=True):
            piece.copy_(summed)
    for tensor, copy in zip(tensors, dense, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)


def agreed(op: str, texts: Sequence[str], group: ProcessGroup | None) -> None:
    """Raises ValueError, on all ranks of the group, unless they have the same texts; one exchange through gloo."""
    from torch import distributed

    own = zlib.crc32("\n".join(texts).encode())
    beside = group_for("cpu", group)
    parts = [torch.zeros(1, dtype=torch.int64) for _ in range(distributed.get_world_size(beside))]
    distributed.all_gather(parts, torch.tensor([own]), group=beside)
    if len({int(part) for part in parts}) == 1:
        return
    every: list[Any] = [None] * len(parts)
    distributed.all_gather_object(every, list(texts), group=beside)
    ranks = distributed.get_process_group_ranks(distributed.group.WORLD if group is None else group)
    first = every[0]
    other = next(index for index, theirs in enumerate(every) if theirs != first)
    at = next((k for k, (a, b) in enumerate(zip(first, every[other], strict=False)) if a != b), None)
    if at is None:
        difference = f"rank {ranks[0]} has {len(first)} of them, and rank {ranks[other]} has {len(every[other])}"
    else:
        difference = f"number {at} is {first[at]} on rank {ranks[0]}, and {every[other][at]} on rank {ranks[other]}"
    raise ValueError(f"{op}: the ranks have different tensors: {difference}; every rank must pass the same list")


_BESIDE: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


def group_for(device: str, group: ProcessGroup | None) -> ProcessGroup | None:
    """The group itself, or a gloo group of its ranks if it cannot send tensors of this device."""
    from torch import distributed

    if device != "cpu" or "cpu" in distributed.get_backend_config(group):
        return group
    whole = distributed.group.WORLD if group is None else group
    if whole not in _BESIDE:
        ranks = distributed.get_process_group_ranks(whole)
        _BESIDE[whole] = distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _BESIDE[whole]


def _buckets(flat: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields lists of consecutive pieces. A list has one dtype and at most BUCKET numbers in all."""
    pieces: list[Tensor] = []
    room = BUCKET
    for tensor in flat:
        for piece in tensor.split(BUCKET):
            if pieces and (len(piece) > room or piece.dtype != pieces[0].dtype):
                yield pieces
                pieces, room = [], BUCKET
            pieces.append(piece)
            room -= len(piece)
    if pieces:
        yield pieces
