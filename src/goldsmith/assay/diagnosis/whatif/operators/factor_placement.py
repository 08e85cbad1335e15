"""Factors on the wrong side of a function, and factors that are left out while their sign stays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...graph.node import Key, Node
from ...graph.tensors import floating
from ..change import Change, instead, with_arguments, with_result

_BENDS = frozenset("exp sigmoid tanh silu gelu relu softplus _softmax _log_softmax log sqrt rsqrt".split())
_DEPTH = 4


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.name in _BENDS and floating(call.args[0]):
        for name, factor in _factors(calls, call):
            text = f"{name} is a factor after {call.name}, not before"

            def after(x: Tensor, *args: object, c: Tensor | float = factor, **kwargs: object) -> Tensor:
                return call.func(x / c, *args, **kwargs) * c

            yield Change("wrong_factor", text, call.index, instead(after), {"factor": name}, 0.5)
    if call.name in ("mul", "div") and len(call.makers) == 2:
        for i, key in enumerate(call.makers):
            negated = _maker(calls, key)
            if negated is not None and negated.name == "neg" and not (call.name == "div" and not i):
                name = negated.operand(0) or "what is negated"
                kept = call.args[1 - i].expand(call.out.shape)
                change = with_result(lambda out, kept=kept: -kept.clone())
                text = f"{name} is left out of {call.expression}, and its sign stays"
                yield Change("wrong_factor", text, call.index, change, {"factor": name, "named": f"1/{name}"}, 0.75)
    if call.name == "neg" and floating(call.out) and call.out.numel() > 1:
        name = call.operand(0) or "what is negated"
        change = with_arguments(lambda args: (torch.ones_like(args[0]),))
        text = f"{name} counts as one in {call.expression}"
        yield Change("wrong_factor", text, call.index, change, {"factor": name, "named": f"1/{name}"}, 0.5)


def _maker(calls: Sequence[Node], key: Key) -> Node | None:
    return calls[key] if isinstance(key, int) and 0 <= key < len(calls) else None


def _factors(calls: Sequence[Node], call: Node) -> list[tuple[str, Tensor | float]]:
    """Factors and divisors applied before the argument, with the shape of a scalar or a row."""
    factors: list[tuple[str, Tensor | float]] = []
    at, depth = call, _DEPTH
    while depth and at.makers:
        at, depth = _maker(calls, at.makers[0]) or call, depth - 1
        if at is call or at.name not in ("mul", "div", "_unsafe_view", "masked_fill", "mm", "bmm"):
            break
        if at.name not in ("mul", "div"):
            continue
        other = at.args[1]
        name = at.operand(1) or "a factor"
        if isinstance(other, int | float) and other:
            factors.append((name, 1.0 / other if at.name == "div" else float(other)))
        elif floating(other) and other.numel() == 1 and bool(other != 0):
            factors.append((name, 1 / other if at.name == "div" else other))
    return factors
