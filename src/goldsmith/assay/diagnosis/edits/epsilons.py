"""Small constants that protect a root, a logarithm or a division: in another place, or of another size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..graph.node import Node, maker_of
from ..graph.tensors import floating
from .golden_edit import CALL, Action, NamedEdit, Part, Primitive, do, named
from .primitives.formulas import plus, unchanged, with_epsilon

ROOTS = ("rsqrt", "rsqrt_", "sqrt", "sqrt_", "reciprocal", "log", "log_")
_ADDED, _LIMITED = ("add", "add_"), ("clamp_min", "clamp_min_", "clamp", "clamp_")
_LARGEST = 1e-2  # a larger constant is not an epsilon
_FIRST = 1e-9  # start of the search for an epsilon if the golden has none; not 0, where the slope of a root is infinite
Form = Callable[[Tensor, float], Tensor]
# function -> (formula of the number a without epsilon and of the constant, its text, prior)
_FORMS: dict[str, tuple[tuple[str, Form, float], ...]] = {
    "rsqrt": (
        ("1 / (sqrt(a) + {})", lambda a, c: 1 / (a.sqrt() + c), 0.7),
        ("1 / max(sqrt(a), {})", lambda a, c: 1 / a.sqrt().clamp_min(c), 0.5),
        ("rsqrt(a) + {}", lambda a, c: torch.rsqrt(a) + c, 0.7),
    ),
    "sqrt": (
        ("max(sqrt(a), {})", lambda a, c: a.sqrt().clamp_min(c), 0.5),
        ("sqrt(a) + {}", lambda a, c: torch.sqrt(a) + c, 0.7),
    ),
    "reciprocal": (("reciprocal(a) + {}", lambda a, c: torch.reciprocal(a) + c, 0.55),),
    "log": (("log(a) + {}", lambda a, c: torch.log(a) + c, 0.7),),
}
_QUOTIENTS: tuple[tuple[str, Callable[[Tensor, Tensor, float], Tensor]], ...] = (
    ("{} / a + {:g}", lambda x, a, c: x / a + c),
    ("{} (1 / a + {:g})", lambda x, a, c: x * (1 / a + c)),
)


@dataclass(frozen=True)
class Epsilon:
    """An operator that adds a small constant c to a number, or takes the maximum of both."""

    node: Node
    c: float
    added: bool

    @property
    def formula(self) -> str:
        name = self.node.operand(0) or "a number"
        return f"{name} + {self.c:g}" if self.added else f"max({name}, {self.c:g})"

    def lifted(self, edit: NamedEdit) -> NamedEdit:
        """The same edit with this constant left out."""
        return edit.acting(Action(self.node.index, CALL, do(unchanged)), *edit.edit.actions)


def epsilon_of(node: Node) -> Epsilon | None:
    added, limited = node.name in _ADDED, node.name in _LIMITED
    if not (added or limited) or len(node.args) < 2 or not floating(node.args[0]) or not floating(node.out):
        return None
    number = node.args[1]
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < abs(number) < _LARGEST:
        return None
    if limited and (len(node.args) > 2 and node.args[2] is not None or node.kwargs.get("max") is not None):
        return None
    return Epsilon(node, float(number) * float(node.kwargs.get("alpha", 1)), added)


def edits(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    if node.name in ROOTS:
        yield from _functions(node, _epsilon_before(node, 0, nodes))
    if node.name in ("div", "div_") and len(node.args) > 1 and floating(node.args[1]):
        epsilon = _epsilon_before(node, 1, nodes)
        if epsilon is None:
            return
        for form, of in _QUOTIENTS:
            text = f"{form.format(node.operand(0) or 'a number', epsilon.c)} stands in place of {node.expression}, "
            text += "a without its constant"
            yield epsilon.lifted(_edit(node, 0.5, text, epsilon.c, (CALL, do(with_epsilon, of=of, c=epsilon.c))))


def _epsilon_before(node: Node, i: int, nodes: Sequence[Node]) -> Epsilon | None:
    """The epsilon in the i-th argument, possibly behind a view."""
    at = sum(isinstance(a, Tensor) for a in node.args[:i])
    key = node.makers[at] if at < len(node.makers) else -1
    maker = maker_of(nodes, key)
    return None if maker is None else epsilon_of(maker)


def _edit(node: Node, prior: float, text: str, c: float, action: tuple[Part, Primitive]) -> NamedEdit:
    return named(node, "absolute_eps", prior, text, action, eps=c)


def _functions(node: Node, epsilon: Epsilon | None) -> Iterator[NamedEdit]:
    """The function of a shifted number, or with its constant outside."""
    text = f"the argument of {node.expression} is shifted by"
    yield named(node, "absolute_eps", 0.55, text, (0, do(plus, c=0.0)), free=0.0)
    begin = _FIRST if epsilon is None else epsilon.c
    for form, of, prior in _FORMS[node.name.rstrip("_")]:
        action = CALL, do(with_epsilon, of=of, c=begin)
        if epsilon is not None:
            text = f"{form.format(f'{begin:g}')} stands in place of {node.expression}"
            yield epsilon.lifted(_edit(node, prior, text, begin, action))
        # max(a, c) is left out: every c below all numbers changes nothing, and would fit as well as another
        if "max" not in form:
            text = f"{form.format('c')} stands in place of {node.expression}, c ="
            fitted = named(node, "absolute_eps", prior - 0.2, text, action, free=begin)
            yield fitted if epsilon is None else epsilon.lifted(fitted)
