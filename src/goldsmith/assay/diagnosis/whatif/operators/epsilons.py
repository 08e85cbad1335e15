"""An epsilon, which keeps roots, logarithms and quotients finite, at another place than in the golden.

The golden changes a number a to a + c or max(a, c). A kernel changes the result instead, or uses another form: f(a) +
c, 1 / (sqrt(a) + c), max(sqrt(a), c), sqrt(a^2 + c). Or its epsilon c differs, or the golden has none there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Changed, Node
from ...graph.tensors import floating, replaced
from ..change import Change, instead, with_arguments

ROOTS = ("rsqrt", "rsqrt_", "sqrt", "sqrt_", "reciprocal", "log", "log_")
_QUOTIENTS = ("div", "div_")
_ADDED, _LIMITED = ("add", "add_"), ("clamp_min", "clamp_min_", "clamp", "clamp_")
_LARGEST = 1e-2  # a larger constant is not an epsilon
_FIRST = 1e-9  # start of the search for an epsilon if the golden has none; not 0, where the slope of a root is infinite
Form = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True)
class EpsilonCall:
    """An operator that adds an epsilon c to a number, or takes the maximum of both, right before a function."""

    call: Node
    c: float
    added: bool

    @property
    def lifted(self) -> Changed:
        """A change that leaves the epsilon out."""
        return instead(lambda a, *rest, **kwargs: a.clone())


def epsilon_of(call: Node) -> EpsilonCall | None:
    """The call as an EpsilonCall, or None if it is another operator."""
    added, limited = call.name in _ADDED, call.name in _LIMITED
    if not (added or limited) or len(call.args) < 2 or not floating(call.args[0]) or not floating(call.out):
        return None
    number = call.args[1]
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < abs(number) < _LARGEST:
        return None
    if limited and (len(call.args) > 2 and call.args[2] is not None or call.kwargs.get("max") is not None):
        return None
    return EpsilonCall(call, float(number) * float(call.kwargs.get("alpha", 1)), added)


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    own = epsilon_of(call)
    if own is not None:
        yield from _at_epsilon(own)
    if call.name in ROOTS:
        yield from _at_function(call, _epsilon_before(call, 0, calls))
    if call.name in _QUOTIENTS and len(call.args) > 1 and floating(call.args[1]):
        epsilon = _epsilon_before(call, 1, calls)
        if epsilon is not None:
            yield from _at_quotient(call, epsilon)


def _epsilon_before(call: Node, i: int, calls: Sequence[Node]) -> EpsilonCall | None:
    """The EpsilonCall that made the call's i-th argument, possibly through a view."""
    at = sum(isinstance(a, Tensor) for a in call.args[:i])
    key = call.makers[at] if at < len(call.makers) else -1
    return epsilon_of(calls[key]) if isinstance(key, int) and 0 <= key < len(calls) else None


def _change(
    call: Node, text: str, c: float, change: Changed, prior: float, group: tuple[tuple[int, Changed], ...] = ()
) -> Change:
    return Change("absolute_eps", text, call.index, change, {"eps": c}, prior, group=group)


# changes at the operator with the epsilon


def _at_epsilon(epsilon: EpsilonCall) -> Iterator[Change]:
    call, c = epsilon.call, epsilon.c
    name = call.operand(0) or "a number"
    forms: list[tuple[str, Form, float]] = [
        (f"{name} + {c:g}", lambda a, c: a + c, 0.55) if not epsilon.added
        else (f"max({name}, {c:g})", lambda a, c: a.clamp_min(c), 0.55)
    ]  # fmt: skip
    if bool((call.args[0] >= 0).all()):  # as for a norm
        forms += [
            (f"sqrt({name}^2 + {c:g})", lambda a, c: (a.square() + c).sqrt(), 0.5),
            (f"sqrt({name}^2 + {c:g}^2)", lambda a, c: (a.square() + c * c).sqrt(), 0.5),
        ]
    for formula, form, prior in forms:
        text = f"{formula} stands in place of {_formula(epsilon)}"
        yield _change(call, text, c, instead(lambda a, *rest, f=form, **kwargs: f(a, c)), prior)
    if c > 0:
        for formula, other in ((f"{c:g}^2", c * c), (f"sqrt({c:g})", c**0.5)):
            text = f"the constant of {_formula(epsilon)} is {formula}"
            yield _change(call, text, other, with_arguments(lambda args, other=other: replaced(args, 1, other)), 0.45)


def _formula(epsilon: EpsilonCall) -> str:
    name = epsilon.call.operand(0) or "a number"
    return f"{name} + {epsilon.c:g}" if epsilon.added else f"max({name}, {epsilon.c:g})"


# changes at the function after it


def _at_function(call: Node, epsilon: EpsilonCall | None) -> Iterator[Change]:
    def inside(c: float) -> Changed:
        return with_arguments(lambda args: replaced(args, 0, args[0] + c))

    yield Change(
        "absolute_eps", f"the argument of {call.expression} is shifted by", call.index, inside, {}, 0.55, free=0.0
    )
    for formula, form, prior in _forms(call):
        if epsilon is not None:
            text = f"{formula.format(f'{epsilon.c:g}')} stands in place of {call.expression}"
            group = ((epsilon.call.index, epsilon.lifted), (call.index, instead(_at(form, epsilon.c))))
            yield _change(call, text, epsilon.c, group[1][1], prior, group)
    for formula, form, prior in _forms(call):
        # max(a, c) is left out: every c below all numbers changes nothing, and would fit as well as another
        if "max" not in formula:
            yield _with_any(call, epsilon, formula, form, prior - 0.2)


def _forms(call: Node) -> Iterator[tuple[str, Form, float]]:
    """(formula, function of the number without epsilon and of the constant, prior)."""
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


def _with_any(call: Node, epsilon: EpsilonCall | None, formula: str, form: Form, prior: float) -> Change:
    """The change with the epsilon that fits best."""

    def make(c: float) -> Changed:
        return instead(_at(form, c))

    group = () if epsilon is None else ((epsilon.call.index, lambda c: epsilon.lifted), (call.index, make))
    begin = _FIRST if epsilon is None else epsilon.c
    text = f"{formula.format('c')} stands in place of {call.expression}, c ="
    return Change("absolute_eps", text, call.index, make, {}, prior, free=begin, group=group)


def _at(form: Form, c: float) -> Callable[..., Tensor]:
    return lambda a, *rest, **kwargs: form(a, c)


# changes at the quotient after it


def _at_quotient(call: Node, epsilon: EpsilonCall) -> Iterator[Change]:
    name, c = call.operand(0) or "a number", epsilon.c
    forms: tuple[tuple[str, Callable[[Any, Tensor], Tensor]], ...] = (
        (f"{name} / a + {c:g}", lambda x, a: x / a + c),
        (f"{name} (1 / a + {c:g})", lambda x, a: x * (1 / a + c)),
    )
    for formula, form in forms:
        change = instead(lambda x, a, *rest, f=form, **kwargs: f(x, a))
        group = ((epsilon.call.index, epsilon.lifted), (call.index, change))
        yield _change(
            call, f"{formula} stands in place of {call.expression}, a without its constant", c, change, 0.5, group
        )
