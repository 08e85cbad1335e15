"""Stages that a loop over chunks or tiles makes piece by piece: put together, and handed out piece by piece."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ...core.tracing import TargetError

_LARGEST = 2**28  # elements: a wrong offset must not fill the memory


class StageTiles:
    """The tiles of one stage so far.

    whole    the stage, as large as the tiles reach; NaN where none has come yet
    covered  where a tile has come
    flaw     why the tiles are not one stage: two differ in one place, or one stands where no stage can ("": they are)
    """

    def __init__(self) -> None:
        self.whole, self.covered, self.flaw = torch.empty(0), torch.empty(0, dtype=torch.bool), ""

    def add(self, name: str, tile: Tensor, at: tuple[object, ...], mask: Tensor | None = None) -> None:
        index = _index(name, tile, at, mask)
        if self.flaw or any(not i.numel() for i in index):
            return
        reach = [int(i.max()) + 1 for i in index]
        if self.whole.dim() == len(reach):
            reach = [max(a, b) for a, b in zip(reach, self.whole.shape, strict=True)]
        if math.prod(reach) > _LARGEST or any(int(i.min()) < 0 for i in index):
            first, last = ([int(pick(i)) for i in index] for pick in (torch.min, torch.max))
            self.flaw = f"one of its tiles stands at {first} to {last}"
            return
        if list(self.whole.shape) != reach:
            whole, covered = _unknown(reach, tile), torch.zeros(reach, dtype=torch.bool, device=tile.device)
            if self.whole.dim() == len(reach):
                known = tuple(slice(0, n) for n in self.whole.shape)
                whole[known], covered[known] = self.whole, self.covered
            self.whole, self.covered = whole, covered
        numbers = (tile if mask is None else tile[mask]).reshape(-1).to(self.whole.dtype)
        before, there = self.whole[index], self.covered[index]
        differs = there & (before != numbers) & ~((before != before) & (numbers != numbers))
        if bool(differs.any()):
            i = int(differs.long().argmax())
            place, values = [int(a[i]) for a in index], (float(before[i]), float(numbers[i]))
            self.flaw = f"two of its tiles differ at {place}: {values[0]:.6g}, then {values[1]:.6g}"
            return
        self.whole[index], self.covered[index] = numbers, True


def part_of(name: str, whole: Tensor, tile: Tensor, at: tuple[object, ...], mask: Tensor | None = None) -> Tensor:
    """The part of a stage that stands in a tile's place; the tile's own numbers where the mask is False."""
    index = _index(name, tile, at, mask)
    fits = len(index) == whole.dim() and all(
        not i.numel() or 0 <= int(i.min()) <= int(i.max()) < n for i, n in zip(index, whole.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"stage {name!r} has shape {list(whole.shape)}; a tile reaches beyond it")
    numbers = whole.detach()[tuple(i.to(whole.device) for i in index)].to(device=tile.device, dtype=tile.dtype)
    if mask is None:
        return numbers.reshape(tile.shape)
    part = tile.detach().clone()
    part[mask] = numbers
    return part


def chunk_of(whole: Tensor, chunk: Tensor, begin: int) -> tuple[Tensor, int]:
    """(the next chunk of a stage, where the one after it begins); the whole stage if the shapes do not fit."""
    axes = [a for a, (n, m) in enumerate(zip(whole.shape, chunk.shape, strict=False)) if n != m]
    if whole.dim() != chunk.dim() or len(axes) != 1 or begin + chunk.shape[axes[0]] > whole.shape[axes[0]]:
        return whole, begin
    size = chunk.shape[axes[0]]
    return whole.narrow(axes[0], begin, size), begin + size


def join_pieces(stages: dict[str, Tensor], covered: Mapping[str, Tensor], golden: Mapping[str, Tensor]) -> None:
    """Makes the pieces of every stage the stage that the golden has, as far as they cover it.

    covered: stage -> where a tile of it has come. A kernel need not compute zeros, and what a softmax makes zeros of:
    where no tile has come, these are the golden's. Elsewhere a place without a tile is NaN.
    """
    for name, places in covered.items():
        if name in stages and name in golden and _fits_in(places.shape, golden[name].shape):
            value = golden[name].to(stages[name].device)
            missing = ~_extended(places, value.shape)
            whole = _extended(stages[name], value.shape)
            skipped = missing & ((value == 0) | (value == -torch.inf))
            stages[name] = torch.where(skipped, value.to(whole.dtype), whole)
    _join_chunks(stages, golden)


def _join_chunks(stages: dict[str, Tensor], golden: Mapping[str, Tensor]) -> None:
    """Makes one stage of `p`, `p#2`, ... if they are the chunks of the golden's `p`; drops them if they are not.

    The same for their gradients `p.grad`, `p#2.grad`, ...
    """
    for name in list(stages):
        stem, dot, grad = name.partition(".grad")
        names = [name]
        while f"{stem}#{len(names) + 1}{dot}{grad}" in stages:
            names.append(f"{stem}#{len(names) + 1}{dot}{grad}")
        if "#" in name or len(names) == 1 or name not in golden or names[1] in golden:
            continue
        whole = _joined([stages[n] for n in names], golden[name].shape)
        for other in names:
            del stages[other]
        if whole is not None:
            stages[name] = whole


def _joined(parts: list[Tensor], shape: torch.Size) -> Tensor | None:
    if any(p.dim() != len(shape) for p in parts):
        return None
    for axis, size in enumerate(shape):
        rest = [(*p.shape[:axis], *p.shape[axis + 1 :]) for p in parts]
        fits = all(r == (*shape[:axis], *shape[axis + 1 :]) for r in rest)
        if fits and sum(p.shape[axis] for p in parts) == size:
            return torch.cat(parts, axis)
    return None


def _fits_in(shape: torch.Size, larger: torch.Size) -> bool:
    return len(shape) == len(larger) and all(n <= m for n, m in zip(shape, larger, strict=True))


def _extended(whole: Tensor, shape: torch.Size) -> Tensor:
    """A tensor that tiles do not reach to the end of, extended to the whole shape."""
    out = _unknown(list(shape), whole)
    out[tuple(slice(0, n) for n in whole.shape)] = whole
    return out


def _index(name: str, tile: Tensor, at: tuple[object, ...], mask: Tensor | None) -> tuple[Tensor, ...]:
    """For each axis of the stage, where along it every element of a tile stands, masked elements left out."""
    index: list[Tensor] = []
    axis = 0
    for entry in at if isinstance(at, tuple) else (at,):
        size = tile.shape[axis] if axis < tile.dim() else 1
        if isinstance(entry, int) or (isinstance(entry, Tensor) and entry.dim() == 0):
            index.append(torch.as_tensor(entry).long())
            continue
        if isinstance(entry, Tensor):
            indices = entry.detach().long().to(tile.device)
            if indices.numel() != size and _spreads(indices, tile.shape):  # an index for each element
                index.append(indices)
                axis = tile.dim()
                continue
            indices = indices.reshape(-1)
        elif isinstance(entry, slice | range):
            start = entry.start or 0
            indices = torch.arange(start, start + size * (entry.step or 1), entry.step or 1)
        else:
            raise TargetError(f"stage({name!r}, ..., at=...) takes slices, ranges, numbers and tensors, got {entry!r}")
        if indices.numel() != size:
            raise TargetError(
                f"stage({name!r}, ..., at=...): {indices.numel()} indices for {size} places of axis {axis}"
            )
        index.append(_along(indices, axis, tile))
        axis += 1
    index += [_along(torch.arange(tile.shape[a]), a, tile) for a in range(axis, tile.dim())]
    if mask is not None and mask.shape != tile.shape:
        raise TargetError(
            f"stage({name!r}, ..., mask=...): shape {list(mask.shape)}, expected the tile's {list(tile.shape)}"
        )
    every = (i.to(tile.device).broadcast_to(tile.shape) for i in index)
    return tuple(i.reshape(-1) if mask is None else i[mask] for i in every)


def _spreads(indices: Tensor, shape: torch.Size) -> bool:
    """Whether indices of as many axes broadcast to a tile's shape."""
    return indices.dim() == len(shape) and all(n in (1, m) for n, m in zip(indices.shape, shape, strict=True))


def _along(indices: Tensor, axis: int, tile: Tensor) -> Tensor:
    """Indices of one axis, for a tile; those of an axis that the tile does not have count for all of it."""
    shape = [1] * tile.dim()
    if axis < tile.dim():
        shape[axis] = indices.numel()
    return indices.reshape(shape)


def _unknown(shape: list[int], like: Tensor) -> Tensor:
    if like.is_floating_point():
        return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)
    return torch.zeros(shape, dtype=like.dtype, device=like.device)
