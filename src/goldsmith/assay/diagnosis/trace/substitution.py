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
from .lookup import GoldenValue
from .recorder import TracedStep

_MOST_VALUES = 48  # golden tensors of one shape
_MOST_LOOKED = 60  # steps
_BINARY = ("add", "sub", "mul", "div")
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
_UNARY = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "reciprocal", "neg", "square", "abs", "sigmoid", "tanh")


@dataclass(frozen=True)
class TracedCall:
    """A call of the step whose result is replaced. out: its own result; turn: the number of such calls before it."""

    func: Callable[..., Any]
    args: tuple
    kwargs: dict
    out: Tensor
    turn: int

    def otherwise(self, i: int, value: object) -> Any:
        """The result with another i-th argument."""
        return self.func(*self.args[:i], value, *self.args[i + 1 :], **self.kwargs)


Make = Callable[[TracedCall], Any]  # no tensor: the call has no such result


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
        self.make, self.count = make, 0
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        number, self.count = self.count, self.count + 1
        turn = self.turns.get(number)
        if turn is None:
            return func(*args, **kwargs)
        before = tuple(a.clone() if isinstance(a, Tensor) else a for a in args) if func._schema.is_mutable else args
        out = func(*args, **kwargs)
        try:
            other = self.make(TracedCall(func, before, kwargs, out, turn)) if isinstance(out, Tensor) else None
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):  # arguments that do not fit
            return out
        if not isinstance(other, Tensor) or other.shape != out.shape:
            return out
        self.made += 1
        return out.copy_(other) if func._schema.is_mutable else other.to(out.dtype).clone()


def substitutes(
    step: TracedStep, values: Sequence[GoldenValue], groups: Mapping[int, list[Tensor]]
) -> Iterator[Substitute]:
    """The other results to try for a step, the likeliest kinds first."""
    out = step.result
    if out is None or not out.numel():
        return
    yield from _of_golden(step, out, values, groups)
    name, real = step.operation.rstrip("_"), out.is_floating_point()
    if out.dtype == torch.bool:
        yield Substitute(partial(_changed, torch.logical_not), "negated", 1)
    for other in _COMPARED if name in _COMPARED else ():
        yield Substitute(partial(_called, other), other, 1)
    for n in () if real or out.dtype == torch.bool else (1, -1):
        yield Substitute(partial(_changed, partial(torch.add, other=n)), f"{n:+d}", 1)
    if not real and name not in _BINARY:
        return
    for other in _BINARY if name in (*_BINARY, "rsub", "addcmul", "floor_divide", "remainder") else ():
        yield Substitute(partial(_called, other), other, 1)
        yield Substitute(partial(_called, other, swapped=True), f"{other}, operands swapped", 1)
    if real:
        yield Substitute(partial(_changed, torch.neg), "negated", 1)
        for other in _UNARY if name in _UNARY else ():
            yield Substitute(partial(_called, other), other, 1)
    for axis in range(out.dim() + 1) if name in ("sum", "mean", "amax", "max") else ():
        yield Substitute(partial(_over, axis), f"over axis {axis}", 1)
    if name == "roll":
        yield Substitute(lambda call: call.otherwise(1, [-s for s in call.args[1]]), "rolled back", 1)
    for n in (1, -1) if name in ("select", "slice") else ():
        yield Substitute(partial(_moved, n), f"index {n:+d}", 1)
    if not real or step.moves:
        return
    for i, argument in enumerate(step.args):
        if isinstance(argument, Tensor) and argument.is_floating_point():
            for value in _alike(argument, values):
                yield Substitute(partial(_with_operand, i, value.numbers), value.name, 2, i)
    signs = ((torch.mul, "times"), (torch.div, "divided by"), (torch.add, "plus"), (torch.sub, "minus"))
    for value in values:
        for sign, word in signs if value.numbers.is_floating_point() and _broadcasts(value.numbers, out) else ():
            changed = partial(_combined, sign, value.numbers)
            yield Substitute(partial(_changed, changed), f"{word} {value.name}", 3)


def _of_golden(
    step: TracedStep, out: Tensor, values: Sequence[GoldenValue], groups: Mapping[int, list[Tensor]]
) -> Iterator[Substitute]:
    """The golden's own tensors, one for each turn of a loop."""
    if step.calls == 1:
        yield from (Substitute(partial(_turns, [v.numbers]), v.name, 0) for v in _alike(out, values))
        return
    for members in groups.values():
        if len(members) == step.calls and members[0].numel() == out.numel():
            yield from (
                Substitute(partial(_turns, order), "the golden's turns", 0) for order in (members, members[::-1])
            )


def _alike(tensor: Tensor, values: Sequence[GoldenValue]) -> list[GoldenValue]:
    """Golden values that can take a tensor's place."""
    kind = tensor.is_floating_point(), tensor.dtype == torch.bool
    fitting = [
        v for v in values
        if v.numbers.numel() == tensor.numel()
        and (v.numbers.is_floating_point(), v.numbers.dtype == torch.bool) == kind
    ]  # fmt: skip
    return sorted(fitting, key=lambda v: tuple(v.numbers.shape) != tuple(tensor.shape))[:_MOST_VALUES]


def _called(name: str, call: TracedCall, *, swapped: bool = False) -> object:
    """Another operator of the same operands."""
    operands = call.args[:2] if name in (*_BINARY, *_COMPARED) else call.args[:1]
    operands = operands[::-1] if swapped else operands
    if any(not isinstance(a, Tensor | int | float) for a in operands) or not isinstance(operands[0], Tensor):
        operands = tuple(torch.as_tensor(a, dtype=call.out.dtype) for a in operands)
    return getattr(torch, name)(*operands)


def _with_operand(i: int, value: Tensor, call: TracedCall) -> object:
    old = call.args[i]
    return call.otherwise(i, value.reshape(old.shape).to(old.dtype))


def _over(axis: int, call: TracedCall) -> object:
    return call.otherwise(1, [axis])


def _moved(by: int, call: TracedCall) -> object:
    return call.otherwise(2, call.args[2] + by)


def _changed(change: Callable[[Tensor], Tensor], call: TracedCall) -> Tensor:
    return change(call.out)


def _combined(sign: Callable[[Tensor, Tensor], Tensor], value: Tensor, out: Tensor) -> Tensor:
    return sign(out, value.to(out.dtype))


def _turns(values: Sequence[Tensor], call: TracedCall) -> Tensor:
    return values[call.turn].reshape(call.out.shape)


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
    steps: Sequence[TracedStep], candidates: Sequence[int], values: Sequence[GoldenValue],
    right: Callable[[Substituting], bool], until: float,
) -> Proof | None:  # fmt: skip
    """The first candidate for which a substitute makes everything right; right: whether a run under a mode is."""
    groups: dict[int, list[Tensor]] = {}
    for value in values:
        if value.group:
            groups.setdefault(value.group, []).append(value.numbers)
    tried = {s: list(substitutes(steps[s], values, groups)) for s in candidates[:_MOST_LOOKED]}
    for rank in range(4):
        for s, each in tried.items():
            for substitute in (one for one in each if one.rank == rank):
                if time.monotonic() > until:
                    return None
                if right(Substituting(steps[s].numbers, substitute.make)):
                    return Proof(s, substitute.what, rank, substitute.operand)
    return None
