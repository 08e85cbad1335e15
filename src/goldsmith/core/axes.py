"""The axes of an operator's tensors, by name: `Op(axes=...)` declares them once.

A pattern lists the axes of one tensor, "*batch n dim". Equal names have equal sizes; a number is a size. `*batch`
stands for any number of leading axes, one entry per token. "..." is any shape, and "features | n dim" is one of two,
told apart by the number of axes. Shape checks (`check_axes`), results
without numbers (`fake`) and the placements of DTensors (sharding.py) follow from the patterns.

The pattern of a result may end in its dtype: "*batch n: sum" is float64 for float64 inputs and float32 otherwise, and
"*batch k: int32" is what it says. Without one, a result has the first input's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .shapes import check_same_device, check_shapes, check_tensor

ANY = "..."


@dataclass(frozen=True)
class Axes:
    """The axes of one tensor; `others` are the shapes that it may have instead."""

    pattern: str
    names: tuple[str, ...]
    per_token: bool
    dtype: str
    others: tuple[Axes, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Axes:
        patterns, _, dtype = text.partition(":")
        first, *others = patterns.split("|")
        words = first.split()
        per_token = bool(words) and words[0].startswith("*")
        names = tuple(words[1:] if per_token else words)
        return cls(first.strip(), names, per_token, dtype.strip(), tuple(map(cls.parse, others)))

    def of(self, tensor: Tensor) -> Axes:
        """The axes that this tensor has: those of the first pattern unless only another one has as many."""
        fitting = (axes for axes in (self, *self.others) if axes.per_token or len(axes.names) == tensor.dim())
        return next(fitting, self)

    @property
    def is_any(self) -> bool:
        return self.names == (ANY,)

    def token_axes(self, tensor: Tensor) -> int:
        """How many leading axes of this tensor are token axes."""
        return tensor.dim() - len(self.names) if self.per_token else 0

    def shape(self, batch: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        own = [int(name) if name.isdigit() else sizes[name] for name in self.names]
        return (*batch, *own) if self.per_token else tuple(own)

    def result_dtype(self, first: Tensor) -> torch.dtype:
        if self.dtype == "sum":
            return torch.float64 if first.dtype == torch.float64 else torch.float32
        return getattr(torch, self.dtype) if self.dtype else first.dtype


def parse_axes(op: str, axes: Mapping[str, str], needed: Sequence[str], tensors: Sequence[str]) -> dict[str, Axes]:
    """The patterns of an operator's tensors, from a table that may serve a whole family.

    Raises ValueError for a tensor without a pattern, because its placement would be a guess.
    """
    missing = [name for name in needed if name not in axes]
    if missing:
        raise ValueError(f"{op}: axes has no pattern for {missing}")
    return {name: Axes.parse(axes[name]) for name in tensors if name in axes}


def check_axes(op: str, axes: Mapping[str, Axes], tensors: Mapping[str, Tensor | None], *, hint: str = "") -> None:
    """Raise TypeError, ShapeError or ValueError unless all tensors are dense, fit their patterns and share a device."""
    present = {name: t for name, t in tensors.items() if t is not None}
    for name, tensor in present.items():
        check_tensor(op, name, tensor)
    own = {name: axes[name].of(tensor) for name, tensor in present.items()}
    check_shapes(op, {n: (t, own[n].pattern) for n, t in present.items() if not own[n].is_any}, hint=hint)
    check_same_device(op, tensors)


def fake(
    axes: Mapping[str, Axes],
    results: Sequence[str],
    tensors: Mapping[str, Tensor | None],
    options: Mapping[str, object],
) -> tuple[Tensor, ...]:
    """Empty results of the declared shapes and dtypes; a size that no input has is the option of that name."""
    sizes: dict[str, Any] = {name: value for name, value in options.items() if isinstance(value, (int, torch.SymInt))}
    batch: Sequence[int] = ()
    first = next(t for t in tensors.values() if t is not None)
    for name, tensor in tensors.items():
        if tensor is None or axes[name].is_any:
            continue
        own = axes[name].of(tensor)
        split = own.token_axes(tensor)
        if own.per_token:
            batch = tensor.shape[:split]
        sizes.update(zip(own.names, tensor.shape[split:], strict=True))
    return tuple(
        torch.empty(axes[name].shape(batch, sizes), dtype=axes[name].result_dtype(first), device=first.device)
        for name in results
    )
