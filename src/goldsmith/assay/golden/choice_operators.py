"""Operators of a golden that choose among scores (topk, sort, argmax, max): records of them, or other choices.

Equal scores have several right choices. A golden that continues with the candidate's choice gives the values and
gradients that belong to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..support.dispatch_mode import DispatchMode

_aten = torch.ops.aten
_RANKED = (_aten.topk.default, _aten.sort.default, _aten.sort.stable)
_REDUCED = (_aten.max.dim, _aten.min.dim)
_INDEX_ALONE = (_aten.argmax.default, _aten.argmin.default)
_LARGEST = (_aten.max.dim, _aten.argmax.default)


@dataclass(frozen=True)
class OperatorChoice:
    """One call of such an operator, with the axis of choices last in `scores` and `index`.

    sign: -1 where the smallest are chosen; ordered: best first; stable: equal scores keep their order.
    """

    scores: Tensor
    index: Tensor
    dim: int
    sign: int = 1
    ordered: bool = True
    stable: bool = False

    def placed(self, index: Tensor, shape: Sequence[int]) -> Tensor:
        """Another index in the shape of the operator's own."""
        return index.movedim(-1, self.dim).reshape(tuple(shape))


class _Operators(DispatchMode):
    """Dispatch mode that records each choice, and replaces those of the given numbers."""

    def __init__(self, others: Mapping[str, Tensor]):
        super().__init__()
        self.others = others
        self.choices: dict[str, OperatorChoice] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if func not in (*_RANKED, *_REDUCED, *_INDEX_ALONE):
            return out
        choice = _choice(func, args, kwargs or {}, out)
        name = f"choice {len(self.choices)}"
        if choice is None:
            return out
        self.choices[name] = choice
        other = self.others.get(name)
        if other is None:
            return out
        index = _index(func, out)
        placed = choice.placed(other.to(index.device, index.dtype), index.shape)
        if func in _INDEX_ALONE:
            return placed
        values = choice.scores.gather(-1, other.to(index.device, torch.int64))
        return choice.placed(values, index.shape), placed


def _choice(func: OpOverload, args: tuple, kwargs: dict, out: object) -> OperatorChoice | None:
    """The record of one call; None for a single number."""
    schema = func._schema.arguments
    given: dict[str, object] = {a.name: a.default_value for a in schema if a.has_default_value()}
    given |= {a.name: value for a, value in zip(schema, args, strict=False)} | kwargs
    scores, dim = cast(Tensor, given["self"]), cast("int | None", given["dim"])
    if not scores.dim() or scores.is_complex():
        return None
    index = _index(func, out)
    if dim is None:
        scores, dim = scores.reshape(-1), 0
        index = index.reshape(1)
    elif func not in _RANKED and not given["keepdim"]:
        index = index.unsqueeze(dim)
    largest = given.get("largest", given.get("descending", func in _LARGEST))
    return OperatorChoice(
        scores.movedim(dim, -1), index.movedim(dim, -1), dim, 1 if largest else -1, bool(given.get("sorted", True)),
        bool(given.get("stable", False)),
    )  # fmt: skip


def _index(func: OpOverload, out: object) -> Tensor:
    return cast(Tensor, out if func in _INDEX_ALONE else cast(Sequence[Tensor], out)[1])


def recording() -> _Operators:
    """Context whose `choices` are those of the operators that run in it."""
    return _Operators({})


def replaced(decisions: Mapping[str, Tensor]) -> AbstractContextManager[object]:
    """Context in which operators make the choices of these numbers ("choice 0", ...)."""
    others = {n: t for n, t in decisions.items() if n.startswith("choice ")}
    return _Operators(others) if others else nullcontext()
