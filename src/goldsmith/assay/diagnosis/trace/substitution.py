"""Substitutions: the candidate runs again with one step's result replaced; if all results are then right, it was wrong.

The other results come from the golden, or from the same operation in a variant: another operator, sign, operand, bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...support.dispatch_mode import DispatchMode
from .recorder import TracedStep

_MOST_VALUES = 48  # golden tensors of one shape
_MOST_LOOKED = 60  # steps
_BINARY = ("add", "sub", "mul", "div")
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
_UNARY = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "reciprocal", "neg", "square", "abs", "sigmoid", "tanh")
Operator = Callable[..., object]
Make = Callable[[Operator, tuple, dict, Tensor, int], Tensor | None]  # (operator, args, kwargs, its result, turn)


@dataclass(frozen=True)
class Substitute:
    """make: the other result. rank: of the kind of change. operand: the number of the argument that it replaces."""

    make: Make
    what: str
    rank: int
    operand: int = -1


class Substituting(DispatchMode):
    """Replaces the results of the calls with these numbers."""

    def __init__(self, calls: Sequence[int], make: Make):
        super().__init__()
        self.turns = {call: turn for turn, call in enumerate(calls)}
        self.make, self.count, self.busy = make, 0, False
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        number, self.count = self.count, self.count + 1
        turn = self.turns.get(number)
        if turn is None:
            return func(*args, **kwargs)
        before = tuple(a.clone() if isinstance(a, Tensor) else a for a in args) if func._schema.is_mutable else args
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor):
            return out
        other = self.make(func, before, kwargs, out, turn)
        if other is None or other.shape != out.shape:
            return out
        self.made += 1
        return out.copy_(other) if func._schema.is_mutable else other.to(out.dtype).clone()


@dataclass(frozen=True)
class GoldenTensorValue:
    """A golden tensor with its shape; group as in `GoldenValue`."""

    name: str
    value: Tensor
    group: int


def substitutes(
    step: TracedStep, values: Sequence[GoldenTensorValue], groups: Mapping[int, list[Tensor]]
) -> Iterator[Substitute]:
    """The other results to try for a step, the likeliest kinds first."""
    out = step.result
    if out is None or not out.numel():
        return
    yield from _of_golden(step, out, values, groups)
    name = step.operation.rstrip("_")
    if out.dtype == torch.bool:
        yield Substitute(_changed(torch.logical_not), "negated", 1)
    if name in _COMPARED:
        for other in _COMPARED:
            yield Substitute(_called(other), other, 1)
    if not out.is_floating_point():
        if out.dtype != torch.bool:
            for n in (1, -1):
                yield Substitute(_changed(partial(torch.add, other=n)), f"{n:+d}", 1)
        if name not in _BINARY:
            return
    if name in _BINARY or name in ("sub", "rsub", "addcmul", "floor_divide", "remainder"):
        for other in _BINARY:
            yield Substitute(_called(other), other, 1)
            yield Substitute(_called(other, swapped=True), f"{other}, operands swapped", 1)
    if out.is_floating_point():
        yield Substitute(_changed(torch.neg), "negated", 1)
        for other in _UNARY if name in _UNARY else ():
            yield Substitute(_called(other), other, 1)
    if name in ("sum", "mean", "amax", "max"):
        for axis in range(out.dim() + 1):
            yield Substitute(_over_axis(axis), f"over axis {axis}", 1)
    if name in ("roll",):
        yield Substitute(_rolled_back, "rolled back", 1)
    if name in ("select", "slice") and isinstance(step.args[2] if len(step.args) > 2 else None, int):
        for n in (1, -1):
            yield Substitute(_index_moved(n), f"index {n:+d}", 1)
    if not out.is_floating_point() or step.moves:
        return
    for i, argument in enumerate(step.args):
        if isinstance(argument, Tensor) and argument.is_floating_point():
            for value in _alike(argument, values):
                yield Substitute(_with_operand(i, value.value), value.name, 2, i)
    for value in values:
        if value.value.is_floating_point() and _broadcasts(value.value, out):
            for sign, word in (
                (torch.mul, "times"),
                (torch.div, "divided by"),
                (torch.add, "plus"),
                (torch.sub, "minus"),
            ):
                yield Substitute(_changed(partial(_combined, sign, value.value)), f"{word} {value.name}", 3)


def _of_golden(
    step: TracedStep, out: Tensor, values: Sequence[GoldenTensorValue], groups: Mapping[int, list[Tensor]]
) -> Iterator[Substitute]:
    if step.calls == 1:
        for value in _alike(out, values):
            shaped = value.value.reshape(out.shape)
            yield Substitute(_turns([shaped]), value.name, 0)
        return
    for members in groups.values():
        if len(members) == step.calls and members[0].numel() == out.numel():
            for order in (members, members[::-1]):
                yield Substitute(
                    _turns(order),
                    "the golden's turns", 0,
                )  # fmt: skip


def _alike(tensor: Tensor, values: Sequence[GoldenTensorValue]) -> list[GoldenTensorValue]:
    """Golden values that can take a tensor's place."""
    kind = tensor.is_floating_point(), tensor.dtype == torch.bool
    fitting = [
        v for v in values
        if v.value.numel() == tensor.numel() and (v.value.is_floating_point(), v.value.dtype == torch.bool) == kind
    ]  # fmt: skip
    return sorted(fitting, key=lambda v: tuple(v.value.shape) != tuple(tensor.shape))[:_MOST_VALUES]


def _called(name: str, *, swapped: bool = False) -> Make:
    def make(func: Operator, args: tuple, kwargs: dict, out: Tensor, turn: int) -> Tensor | None:
        operands = args[:2] if name in (*_BINARY, *_COMPARED) else args[:1]
        operands = operands[::-1] if swapped else operands
        if any(not isinstance(a, Tensor | int | float) for a in operands) or not isinstance(operands[0], Tensor):
            operands = tuple(torch.as_tensor(a, dtype=out.dtype) for a in operands)
        result = getattr(torch, name)(*operands)
        return result if isinstance(result, Tensor) else None

    return make


def _with_operand(i: int, value: Tensor) -> Make:
    def make(func: Operator, args: tuple, kwargs: dict, out: Tensor, turn: int) -> Tensor | None:
        old = args[i] if i < len(args) else None
        if not isinstance(old, Tensor) or old.numel() != value.numel():
            return None
        changed = (*args[:i], value.reshape(old.shape).to(old.dtype), *args[i + 1 :])
        result = func(*changed, **kwargs)
        return result if isinstance(result, Tensor) else None

    return make


def _changed(change: Callable[[Tensor], Tensor]) -> Make:
    return lambda func, args, kwargs, out, turn: change(out)


def _combined(sign: Callable[[Tensor, Tensor], Tensor], value: Tensor, out: Tensor) -> Tensor:
    return sign(out, value.to(out.dtype))


def _turns(values: Sequence[Tensor]) -> Make:
    """The golden's tensor of each turn."""

    def make(func: Operator, args: tuple, kwargs: dict, out: Tensor, turn: int) -> Tensor | None:
        return values[turn].reshape(out.shape) if values[turn].numel() == out.numel() else None

    return make


def _over_axis(axis: int) -> Make:
    def make(func: Operator, args: tuple, kwargs: dict, out: Tensor, turn: int) -> Tensor | None:
        result = func(args[0], [axis], *args[2:], **kwargs) if len(args) > 1 and axis < args[0].dim() else None
        return result if isinstance(result, Tensor) else None

    return make


def _rolled_back(func: Operator, args: tuple, kwargs: dict, out: Tensor, turn: int) -> Tensor | None:
    result = func(args[0], [-s for s in args[1]], *args[2:], **kwargs)
    return result if isinstance(result, Tensor) else None


def _index_moved(by: int) -> Make:
    def make(func: Operator, args: tuple, kwargs: dict, out: Tensor, turn: int) -> Tensor | None:
        result = func(*args[:2], args[2] + by, *args[3:], **kwargs)
        return result if isinstance(result, Tensor) else None

    return make


def _broadcasts(value: Tensor, out: Tensor) -> bool:
    if value.numel() > out.numel() or value.dim() > out.dim():
        return False
    return all(a in (1, b) for a, b in zip(reversed(value.shape), reversed(out.shape), strict=False))


@dataclass(frozen=True)
class Proof:
    """The step whose other result makes all results right."""

    step: int
    what: str
    rank: int
    operand: int = -1


def proven(
    steps: Sequence[TracedStep], candidates: Sequence[int], values: Sequence[GoldenTensorValue],
    right: Callable[[Substituting], bool], until: float,
) -> Proof | None:  # fmt: skip
    """The first candidate for which a substitute makes everything right; right: whether a run under a mode is."""
    groups: dict[int, list[Tensor]] = {}
    for value in values:
        if value.group:
            groups.setdefault(value.group, []).append(value.value)
    tried: dict[int, list[Substitute]] = {}
    for s in candidates[:_MOST_LOOKED]:
        tried[s] = list(substitutes(steps[s], values, groups))
    for rank in range(4):
        for s, each in tried.items():
            for substitute in each:
                if substitute.rank != rank:
                    continue
                if time.monotonic() > until:
                    return None
                if right(Substituting(steps[s].numbers, _safe(substitute.make))):
                    return Proof(s, substitute.what, rank, substitute.operand)
    return None


def _safe(make: Make) -> Make:
    def guarded(func: Operator, args: tuple, kwargs: dict, out: Tensor, turn: int) -> Tensor | None:
        try:
            return make(func, args, kwargs, out, turn)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return None

    return guarded
