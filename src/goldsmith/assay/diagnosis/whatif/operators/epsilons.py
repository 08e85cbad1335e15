"""A small constant that keeps roots, logarithms and quotients finite, added at another place than in the golden.

The golden guards a number a as a + c or max(a, c). A kernel guards the result instead, or in another form: f(a) + c,
1 / (sqrt(a) + c), max(sqrt(a), c), sqrt(a^2 + c). Or its constant differs, or the golden has no constant there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..run.calls import Change, Changed, OperatorCall, floating, instead, replaced, with_arguments

ROOTS = ("rsqrt", "rsqrt_", "sqrt", "sqrt_", "reciprocal", "log", "log_")
_QUOTIENTS = ("div", "div_")
_ADDED, _LIMITED = ("add", "add_"), ("clamp_min", "clamp_min_", "clamp", "clamp_")
_SMALL = 1e-2  # a larger constant is no guard
_FIRST = 1e-9  # start of the search for a constant if the golden has none: the slope of a root at 0 is infinite
Form = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True)
class GuardedCall:
    """An operator that adds a small constant, or takes the maximum with it, right before a function."""

    call: OperatorCall
    c: float
    added: bool

    @property
    def lifted(self) -> Changed:
        """The number without the constant."""
        return instead(lambda a, *rest, **kwargs: a.clone())


def guard_of(call: OperatorCall) -> GuardedCall | None:
    """The call as a guard; None if it is none."""
    added, limited = call.name in _ADDED, call.name in _LIMITED
    if not (added or limited) or len(call.args) < 2 or not floating(call.args[0]) or not floating(call.out):
        return None
    number = call.args[1]
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < abs(number) < _SMALL:
        return None
    if limited and (len(call.args) > 2 and call.args[2] is not None or call.kwargs.get("max") is not None):
        return None
    return GuardedCall(call, float(number) * float(call.kwargs.get("alpha", 1)), added)


def changes(call: OperatorCall, calls: Sequence[OperatorCall] = ()) -> Iterator[Change]:
    own = guard_of(call)
    if own is not None:
        yield from _guarded_otherwise(own)
    if call.name in ROOTS:
        yield from _at_function(call, _guard_before(call, 0, calls))
    if call.name in _QUOTIENTS and len(call.args) > 1 and floating(call.args[1]):
        guard = _guard_before(call, 1, calls)
        if guard is not None:
            yield from _at_quotient(call, guard)


def _guard_before(call: OperatorCall, i: int, calls: Sequence[OperatorCall]) -> GuardedCall | None:
    """The guard that made the call's i-th argument, possibly through a view."""
    at = sum(isinstance(a, Tensor) for a in call.args[:i])
    key = call.makers[at] if at < len(call.makers) else -1
    return guard_of(calls[key]) if isinstance(key, int) and 0 <= key < len(calls) else None


def _change(
    call: OperatorCall, text: str, c: float, change: Changed, prior: float, group: tuple[tuple[int, Changed], ...] = ()
) -> Change:
    return Change("absolute_eps", text, call.index, change, {"eps": c}, prior, group=group)


# changes at the guard itself


def _guarded_otherwise(guard: GuardedCall) -> Iterator[Change]:
    call, c = guard.call, guard.c
    name = call.operand(0) or "a number"
    forms: list[tuple[str, Form, float]] = [
        (f"{name} + {c:g}", lambda a, c: a + c, 0.55) if not guard.added
        else (f"max({name}, {c:g})", lambda a, c: a.clamp_min(c), 0.55)
    ]  # fmt: skip
    if bool((call.args[0] >= 0).all()):  # as for a norm
        forms += [
            (f"sqrt({name}^2 + {c:g})", lambda a, c: (a.square() + c).sqrt(), 0.5),
            (f"sqrt({name}^2 + {c:g}^2)", lambda a, c: (a.square() + c * c).sqrt(), 0.5),
        ]
    for formula, form, prior in forms:
        text = f"{formula} stands in place of {_formula(guard)}"
        yield _change(call, text, c, instead(lambda a, *rest, f=form, **kwargs: f(a, c)), prior)
    if c > 0:
        for formula, other in ((f"{c:g}^2", c * c), (f"sqrt({c:g})", c**0.5)):
            text = f"the constant of {_formula(guard)} is {formula}"
            yield _change(call, text, other, with_arguments(lambda args, other=other: replaced(args, 1, other)), 0.45)


def _formula(guard: GuardedCall) -> str:
    name = guard.call.operand(0) or "a number"
    return f"{name} + {guard.c:g}" if guard.added else f"max({name}, {guard.c:g})"


# changes at the function of the guarded number


def _at_function(call: OperatorCall, guard: GuardedCall | None) -> Iterator[Change]:
    def inside(c: float) -> Changed:
        return with_arguments(lambda args: replaced(args, 0, args[0] + c))

    yield Change(
        "absolute_eps", f"the argument of {call.expression} is shifted by", call.index, inside, {}, 0.55, free=0.0
    )
    for formula, form, prior in _forms(call):
        if guard is not None:
            text = f"{formula.format(f'{guard.c:g}')} stands in place of {call.expression}"
            group = ((guard.call.index, guard.lifted), (call.index, instead(_at(form, guard.c))))
            yield _change(call, text, guard.c, group[1][1], prior, group)
    for formula, form, prior in _forms(call):
        if (
            "max" not in formula
        ):  # if no number is that small, the largest constant that changes nothing would fit as well
            yield _with_any(call, guard, formula, form, prior - 0.2)


def _forms(call: OperatorCall) -> Iterator[tuple[str, Form, float]]:
    """(formula, function of the unguarded number and the constant, prior)."""
    name = call.name.rstrip("_")
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "rsqrt": torch.rsqrt, "sqrt": torch.sqrt, "reciprocal": torch.reciprocal, "log": torch.log,
    }  # fmt: skip
    f = functions[name]
    if name == "rsqrt":
        yield "1 / (sqrt(a) + {})", lambda a, c: 1 / (a.sqrt() + c), 0.7
        yield "1 / max(sqrt(a), {})", lambda a, c: 1 / a.sqrt().clamp_min(c), 0.5
    if name == "sqrt":
        yield "max(sqrt(a), {})", lambda a, c: a.sqrt().clamp_min(c), 0.5
    yield f"{name}(a) + {{}}", lambda a, c: f(a) + c, 0.7 if name != "reciprocal" else 0.55


def _with_any(call: OperatorCall, guard: GuardedCall | None, formula: str, form: Form, prior: float) -> Change:
    """The change with the constant that fits best."""

    def make(c: float) -> Changed:
        return instead(_at(form, c))

    group = () if guard is None else ((guard.call.index, lambda c: guard.lifted), (call.index, make))
    begin = _FIRST if guard is None else guard.c
    text = f"{formula.format('c')} stands in place of {call.expression}, c ="
    return Change("absolute_eps", text, call.index, make, {}, prior, free=begin, group=group)


def _at(form: Form, c: float) -> Callable[..., Tensor]:
    return lambda a, *rest, **kwargs: form(a, c)


# changes at the quotient by the guarded number


def _at_quotient(call: OperatorCall, guard: GuardedCall) -> Iterator[Change]:
    name, c = call.operand(0) or "a number", guard.c
    forms: tuple[tuple[str, Callable[[Any, Tensor], Tensor]], ...] = (
        (f"{name} / a + {c:g}", lambda x, a: x / a + c),
        (f"{name} (1 / a + {c:g})", lambda x, a: x * (1 / a + c)),
    )
    for formula, form in forms:
        change = instead(lambda x, a, *rest, f=form, **kwargs: f(x, a))
        group = ((guard.call.index, guard.lifted), (call.index, change))
        yield _change(
            call, f"{formula} stands in place of {call.expression}, a without its constant", c, change, 0.5, group
        )
