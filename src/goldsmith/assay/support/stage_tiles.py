"""Stages that a loop over chunks or tiles makes piece by piece: put together, and handed out piece by piece."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...core.tracing import TargetError


class StageTiles:
    """The tiles of one stage so far. whole: the stage, as large as the tiles reach; NaN where none has come yet."""

    def __init__(self) -> None:
        self.whole = torch.empty(0)

    def add(self, name: str, tile: Tensor, at: tuple[object, ...]) -> None:
        index = _index(name, tile, at)
        reach = [int(i.max()) + 1 if i.numel() else 0 for i in index]
        if self.whole.dim() != len(reach):
            self.whole = _unknown(reach, tile)
        elif any(n > have for n, have in zip(reach, self.whole.shape, strict=True)):
            larger = _unknown([max(a, b) for a, b in zip(reach, self.whole.shape, strict=True)], tile)
            larger[tuple(slice(0, n) for n in self.whole.shape)] = self.whole
            self.whole = larger
        self.whole = self.whole.clone()  # an earlier record stays as it was
        self.whole[torch.meshgrid(*index, indexing="ij")] = tile.reshape([i.numel() for i in index])


def part_of(name: str, whole: Tensor, tile: Tensor, at: tuple[object, ...]) -> Tensor:
    """The part of a stage that stands in a tile's place."""
    index = _index(name, tile, at)
    if len(index) != whole.dim() or any(
        i.numel() and int(i.max()) >= n for i, n in zip(index, whole.shape, strict=True)
    ):
        raise ValueError(f"stage {name!r} has shape {list(whole.shape)}; a tile reaches beyond it")
    return whole[torch.meshgrid(*(i.to(whole.device) for i in index), indexing="ij")].reshape(tile.shape)


def chunk_of(whole: Tensor, chunk: Tensor, begin: int) -> tuple[Tensor, int]:
    """(the next chunk of a stage, where the one after it begins); the whole stage if the shapes do not fit."""
    axes = [a for a, (n, m) in enumerate(zip(whole.shape, chunk.shape, strict=False)) if n != m]
    if whole.dim() != chunk.dim() or len(axes) != 1 or begin + chunk.shape[axes[0]] > whole.shape[axes[0]]:
        return whole, begin
    size = chunk.shape[axes[0]]
    return whole.narrow(axes[0], begin, size), begin + size


def join_chunks(stages: dict[str, Tensor], golden: Mapping[str, Tensor]) -> None:
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


def _index(name: str, tile: Tensor, at: tuple[object, ...]) -> list[Tensor]:
    """The indices of a tile along each axis of the stage."""
    index: list[Tensor] = []
    axis = 0
    for entry in at if isinstance(at, tuple) else (at,):
        size = tile.shape[axis] if axis < tile.dim() else 1
        if isinstance(entry, Tensor):
            indices = entry.detach().reshape(-1).long().cpu()
        elif isinstance(entry, int):
            indices, size, axis = torch.tensor([entry]), 1, axis - 1
        elif isinstance(entry, slice | range):
            start = entry.start or 0
            indices = torch.arange(start, start + size * (entry.step or 1), entry.step or 1)
        else:
            raise TargetError(f"stage({name!r}, ..., at=...) takes slices, ranges, numbers and tensors, got {entry!r}")
        if indices.numel() != size:
            raise TargetError(
                f"stage({name!r}, ..., at=...): {indices.numel()} indices for {size} places of axis {axis}"
            )
        index.append(indices)
        axis += 1
    return index + [torch.arange(n) for n in tile.shape[axis:]]


def _unknown(shape: list[int], like: Tensor) -> Tensor:
    if like.is_floating_point():
        return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)
    return torch.zeros(shape, dtype=like.dtype, device=like.device)
