"""Softmax and logsumexp: another total, another base, parts that are not rescaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ..graph.node import Node
from ..graph.tensors import floating
from .golden_edit import CALL, NamedEdit, do, named
from .primitives.repartitions import (
    early_factors,
    logsumexp_from,
    online_logsumexp,
    online_softmax,
    softmax_apart,
    softmax_from,
    softmax_total,
)
from .primitives.spans import BLOCKS
from .primitives.tensors import constant, restrict
from .reductions import cut

_SOFTMAX = ("_softmax", "_log_softmax")
_LN2, _LOG2E = math.log(2.0), 1 / math.log(2.0)
# formulas of the log-softmax in x, its maximum m, and s = log(sum(exp(x - m)))
_OF_SOFTMAX: tuple[tuple[str, str, Callable[[Tensor, Tensor, Tensor], Tensor]], ...] = (
    ("wrong_factor", "is times 1/ln 2 within, as if its numbers were to base 2", lambda x, m, s: _LOG2E * (x - m - s)),
    ("wrong_factor", "is times ln 2 within, as if its numbers were to base e", lambda x, m, s: _LN2 * (x - m - s)),
    ("wrong_factor", "has its argument to base e, and all else to base 2", lambda x, m, s: _LN2 * x - m - s),
    ("wrong_factor", "has its argument to base 2, and all else to base e", lambda x, m, s: _LOG2E * x - m - s),
    ("wrong_factor", "has the logarithm of its sum to base 2, and all else to base e",
     lambda x, m, s: x - _LOG2E * (m + s)),
    ("wrong_factor", "has the logarithm of its sum to base e, and all else to base 2",
     lambda x, m, s: x - _LN2 * (m + s)),
    ("wrong_factor", "adds a logarithm to base e to a maximum to base 2", lambda x, m, s: x - m - _LN2 * s),
    ("wrong_factor", "adds a logarithm to base 2 to a maximum to base e", lambda x, m, s: x - m - _LOG2E * s),
    ("missing_term", "lacks the maximum in the logarithm of its sum", lambda x, m, s: x - s),
    ("missing_term", "has the maximum alone for the logarithm of its sum", lambda x, m, s: x - m),
)  # fmt: skip
# formulas of the logsumexp in m and s
_OF_SUM: tuple[tuple[str, str, Callable[[Tensor, Tensor], Tensor]], ...] = (
    ("wrong_factor", "is to base 2", lambda m, s: _LOG2E * (m + s)),
    ("wrong_factor", "is taken to base e of numbers to base 2", lambda m, s: _LN2 * (m + s)),
    ("wrong_factor", "adds a logarithm to base e to a maximum to base 2", lambda m, s: m + _LN2 * s),
    ("wrong_factor", "adds a logarithm to base 2 to a maximum to base e", lambda m, s: m + _LOG2E * s),
    ("missing_term", "lacks the maximum", lambda m, s: s),
    ("missing_term", "is the maximum alone", lambda m, s: m),
    ("missing_term", "adds the sum itself to the maximum", lambda m, s: m + s.exp()),
)


def edits(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    if not node.args or not floating(node.args[0]) or not node.args[0].dim():
        return
    if node.name in _SOFTMAX:
        yield from _totals(node)
        yield from _online(node)
        for cause, text, of in _OF_SOFTMAX:
            formula = CALL, do(softmax_from, of=of, axis=node.args[1])
            yield named(node, cause, 0.5, f"{node.expression} {text}", formula)
        for inside, where in ((False, "outside of its sum"), (True, "in its sum alone")):
            apart = CALL, do(softmax_apart, axis=node.args[1], of_sum=inside, c=1.0)
            text = f"the argument of {node.expression} is multiplied, {where}, by"
            yield named(node, "wrong_factor", 0.5, text, apart, free=1.0)
    elif node.name == "logsumexp":
        axes, keep = tuple(node.args[1]), len(node.args) > 2 and bool(node.args[2])
        for cause, text, of_sum in _OF_SUM:
            formula = CALL, do(logsumexp_from, of=of_sum, axes=axes, keep=keep)
            yield named(node, cause, 0.5, f"{node.expression} {text}", formula)
        if len(axes) == 1:
            for block in _blocks(node.args[0].shape[axes[0]]):
                online = CALL, do(online_logsumexp, axis=axes[0] % node.args[0].dim(), block=block, keep=keep)
                yield _not_rescaled(node, "sum", block, online)
    elif node.name in ("sum", "mm", "bmm"):
        yield from _softened_factors(node)


def _totals(node: Node) -> Iterator[NamedEdit]:
    x, axis = node.args[0], node.args[1] % node.args[0].dim()
    n, expression = x.shape[axis], node.expression
    for cause, prior, text, span, params in cut("the sum of the softmax", node.operand(0), axis, n):
        total = CALL, do(softmax_total, axis=axis, of="span", span=span)
        yield named(node, cause, prior, text, total, **params)
        alone = 0, do(restrict, axis=axis, span=span, fill=-math.inf)
        text = text.replace("the sum of the softmax", expression)
        yield named(node, cause, prior, text, alone, **params)
    text = f"of the addends of the sum of {expression} the last one is left: a store stands where an addition should"
    yield named(node, "lost_update", 0.6, text, (CALL, do(softmax_total, axis=axis, of="last")),
                also=("overwritten_accumulator", "truncated_reduction"), axis=axis)  # fmt: skip
    padded = {1 << max(n - 1, 1).bit_length() if n & (n - 1) else n * 2: 0}
    for width in padded | {n + -n % block: 0 for block in BLOCKS if -n % block}:
        text = f"{width - n} zeros take part in {expression}: its tail up to {width} is not masked"
        zeros = CALL, do(softmax_total, axis=axis, of="zeros", count=width - n)
        yield named(node, "wrong_mask", 0.75, text, zeros, axis=axis, padded=width)
    if x.dim() > 1:
        other = (axis - 1) % x.dim()
        text = f"{expression} runs along axis {other} instead of {axis}"
        yield named(node, "wrong_axis", 0.65, text, (1, do(constant, new=other)), axis=other, golden_axis=axis)
    for other in (d for d in range(x.dim()) if d != axis and x.shape[d] > 1):
        text = f"the sum of {expression} runs along axis {other} instead of {axis}, its maximum along {axis}"
        across = CALL, do(softmax_total, axis=axis, of="other axis", other=other)
        yield named(node, "wrong_axis", 0.6, text, across, axis=other, golden_axis=axis)
    if node.name == "_softmax":
        text = f"the exponentials of {expression} are not divided by their sum"
        yield named(node, "wrong_factor", 0.55, text, (CALL, do(softmax_total, axis=axis, of="maximum")),
                    also=("missing_rescale", "missing_term"), factor="the sum")  # fmt: skip


def _blocks(n: int) -> Iterator[int]:
    return (block for block in (1, 2, 4, *BLOCKS) if block < n)


def _not_rescaled(node: Node, which: str, block: int, *actions: tuple) -> NamedEdit:
    text = f"the {which} of an online softmax in blocks of {block} is not rescaled"
    return named(node, "missing_rescale", 0.6, text, *actions, block=block, which=which)


def _online(node: Node) -> Iterator[NamedEdit]:
    axis = node.args[1] % node.args[0].dim()
    kept = ("sum", "accumulator", "sum and accumulator")[: 1 if node.name == "_log_softmax" else 3]
    for block in _blocks(node.args[0].shape[axis]):
        for which in kept:
            yield _not_rescaled(node, which, block, (CALL, do(online_softmax, axis=axis, block=block, which=which)))
    for which in kept:
        text = f"the {which} of a recurrent softmax is not rescaled from step to step, only where it is read"
        recurrent = CALL, do(online_softmax, axis=axis, block=0, which=which)
        yield named(node, "missing_rescale", 0.55, text, recurrent, block=1, which=which)


def _softened_factors(node: Node) -> Iterator[NamedEdit]:
    """A sum in which each row's largest factor is 1, because it was already divided by exp of its maximum."""
    dims = node.args[1] if node.name == "sum" and len(node.args) > 1 else None
    if node.name == "sum" and not (isinstance(dims, list | tuple) and len(dims) == 1):
        return
    places = ((0, dims[0], "sum"),) if dims is not None else ((0, -1, "accumulator"), (1, -2, "accumulator"))
    for place, axis, which in places:
        x = node.args[place]
        if not floating(x) or x.dim() < 1 or x.shape[axis] < 2 or not x.numel() or bool((x < 0).any()):
            continue
        if bool((x.amax(axis) == 1).all()) and bool((x != 1).any()):
            for block in _blocks(x.shape[axis]):
                early = place, do(early_factors, axis=axis % x.dim(), block=block)
                yield _not_rescaled(node, which, block, early)
