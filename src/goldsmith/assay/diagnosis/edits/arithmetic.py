"""Sums, products and functions of elements: an addend or a factor dropped, repeated, or with the other sign."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..graph.node import Node, maker_of
from ..graph.tensors import floating, masks, whole
from .epsilons import ROOTS
from .golden_edit import CALL, RESULT, NamedEdit, do, named
from .primitives.formulas import (
    ACTIVATIONS,
    DERIVATIVES,
    ROUNDINGS,
    WRAPPED,
    add_after,
    addend_sign,
    applied,
    drop_factor,
    formula,
    function,
    plus,
    repeat_factor,
    scale_addend,
    scale_after,
    scale_inner_product,
    unchanged,
    weigh_addends,
    without_bias,
)
from .primitives.tensors import constant, scale

_ADDS = ("add", "add_", "sub", "sub_", "rsub")
_SCALES = ("mul", "mul_", "div", "div_")
_BENDS = frozenset(
    "exp exp_ sigmoid tanh _softmax silu gelu _log_softmax relu softplus sin cos logsumexp".split()
) | {*ROOTS}  # fmt: skip
_SKIPPED = frozenset("exp sigmoid tanh silu gelu relu softplus square abs sin cos".split()) | {*ROOTS}
_CLAMPS = frozenset("clamp clamp_min clamp_max relu maximum minimum hardtanh".split())
_BIASED = {"addmm": torch.mm, "baddbmm": torch.bmm, "addcmul": torch.mul, "addmv": torch.mv}
_MOVES = frozenset(
    """clone detach copy_ view expand unsqueeze t transpose permute alias squeeze slice select zeros ones full
    zeros_like ones_like cat _to_copy _unsafe_view fill_ zero_ new_zeros empty_like new_empty scalar_tensor arange
    as_strided lift_fresh""".split()
)  # a mistake in their result shows up elsewhere
_WRAPS = frozenset("mul div add sub mean sum amax exp sigmoid tanh mm bmm var addmm".split())
_MOVED_FACTORS = frozenset("exp sigmoid tanh silu gelu relu softplus _softmax _log_softmax log sqrt rsqrt".split())
# for integers, which positions are made of, the same mistakes have other names
_OF_PLACES = {"missing_term": "invalid_index", "repeated_term": "invalid_index", "wrong_factor": "wrong_stride"}
_DIVISIONS = 16  # each needs a search for a number, and a loop has too many


def edits(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    for edit in _elementwise(node, nodes):
        other = _OF_PLACES.get(edit.cause) if whole(node.out) else None
        if other == "invalid_index" and any(a in (1, -1) for a in node.args[:2] if isinstance(a, int)):
            other = "off_by_one"
        yield edit if other is None else replace(edit, cause=other, also=(edit.cause, *edit.also))
    yield from _functions(node)
    yield from _divisors(node, nodes)
    yield from _placed_factors(node, nodes)


def _name(node: Node, i: int) -> str:
    return node.operand(i) or f"an operand of {node.name}"


def _elementwise(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    name, expression = node.name, node.expression
    if name in _ADDS and len(node.args) > 1:
        yield from _sums(node, nodes)
    if name in _SCALES and len(node.args) > 1:
        yield from _products(node)
        yield from _counts(node)
    if name in _BIASED:
        yield from _biased(node)
    if name in _BENDS:
        text = f"the argument of {expression} is multiplied by"
        yield named(node, "wrong_factor", 0.6, text, (0, do(scale, c=1.0)), free=1.0)
    for cause, text, of in DERIVATIVES.get(name, ()) if node.backward or name != "linalg_cross" else ():
        yield named(node, cause, 0.6, f"{expression} {text}", (CALL, do(formula, of=of)))
    if name == "_softmax_backward_data":
        text = f"the inner product of {expression} is multiplied by"
        yield named(node, "wrong_factor", 0.5, text, (CALL, do(scale_inner_product, c=1.0)), free=1.0)
    if name in _SKIPPED:
        cause = "wrong_saved_tensor" if node.backward else "wrong_factor"
        text = f"{name} is not applied to {_name(node, 0)}"
        yield named(node, cause, 0.35, text, (CALL, do(unchanged)), function=name)
    if name == "_log_softmax":
        text = f"the logarithm of the sum is left out of {expression}"
        yield named(node, "missing_term", 0.6, text, (CALL, do(unchanged)), term="logsumexp")
    if name in _CLAMPS:
        cause, *also = ("empty_group", "wrong_mask") if _of_counts(node) else ("wrong_mask",)
        text = f"the limits of {expression} are not applied"
        yield named(node, cause, 0.6, text, (CALL, do(unchanged)), also=tuple(also))
    if name == "silu":
        text = f"sigmoid({_name(node, 0)}) stands in place of {expression}"
        sigmoid = CALL, do(function, of=torch.sigmoid)
        yield named(node, "wrong_factor", 0.6, text, sigmoid, factor=_name(node, 0))
    if name in _BENDS or name in _CLAMPS:
        yield from _added_after(node, nodes)
    if name in ("square", "pow"):
        text = f"|{_name(node, 0)}| stands in place of {expression}"
        yield named(node, "wrong_factor", 0.3, text, (CALL, do(function, of=torch.abs)), factor=_name(node, 0))
    if isinstance(node.out, Tensor) and floating(node.out) and node.out.numel() and name not in _MOVES:
        prior = 0.45 if name == "neg" and node.backward else 0.3  # the sign of a gradient is easily forgotten
        yield named(node, "sign_flip", prior, f"{expression} has the other sign", (RESULT, do(applied, of=torch.neg)))


def _of_counts(node: Node) -> bool:
    """Whether it protects a division by the counts of empty groups: integers, some of them 0, clamped to 1."""
    x = node.args[0]
    counted = isinstance(x, Tensor) and x.numel() > 1 and bool((x == x.round()).all()) and bool((x >= 0).all())
    return (
        counted and isinstance(node.out, Tensor) and bool((node.out == x.clamp(min=1)).all()) and bool((x == 0).any())
    )


def _added_after(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    """f(a) + b in place of f(a + b)."""
    before = maker_of(nodes, node.makers[0]) if node.makers else None
    if before is None or before.name not in ("add", "sub") or not all(isinstance(a, Tensor) for a in before.args[:2]):
        return
    s = addend_sign(before.name, float(before.kwargs.get("alpha", 1)))
    for i, signs in enumerate(((1.0, s), (s, 1.0))):
        term = _name(before, 1 - i)
        after = CALL, do(add_after, sign_kept=signs[0], sign_added=signs[1])
        text = f"{term} is added after {node.name}, not before"
        edit = named(node, "missing_term", 0.4, text, after, term=term)
        action = replace(edit.edit.actions[0], reads=(("kept", (before.index, i)), ("added", (before.index, 1 - i))))
        yield edit.acting(action)


def _sums(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    """a + s b and a - s b: a term missing, twice, or with the other sign."""
    a, b = node.args[1::-1] if node.name == "rsub" else node.args[:2]
    scalar = not isinstance(b, Tensor) or not isinstance(a, Tensor)
    first, second = _name(node, 0), _name(node, 1)
    first, second = (second, first) if node.name == "rsub" else (first, second)
    epsilon = scalar and isinstance(b, float) and abs(b) < 1e-2
    expression = node.expression

    def weighed(a: float, b: float) -> tuple:
        return CALL, do(weigh_addends, a=a, b=b)

    cause, prior, also, text = "missing_term", 0.8, tuple[str, ...](), f"{second} is left out of {expression}"
    if epsilon:
        cause, prior = "absolute_eps", 0.75
    if _exclusive(node, nodes):
        cause, also = "off_by_one", ("missing_term", "mask_shift")
        text = f"the running sum includes the position itself, and should end before it: {text}"
    yield named(node, cause, prior, text, weighed(1, 0), also=also, term=second)
    if not scalar:
        text = f"{first} is left out of {expression}"
        yield named(node, "missing_term", 0.8, text, weighed(0, 1), term=first)
        for term, times in ((second, (1, 2)), (first, (2, 1))):
            text = f"{term} is added twice in {expression}"
            yield named(node, "repeated_term", 0.6, text, weighed(*times), term=term, times=2)
    yield named(node, "sign_flip", 0.8, f"{second} has the other sign in {expression}", weighed(1, -1), term=second)
    if not scalar:
        yield named(node, "sign_flip", 0.7, f"{first} has the other sign in {expression}", weighed(-1, 1), term=first)
        bent = any(n.name in _BENDS and node.index in n.makers for n in nodes)
        for which, term in enumerate((first, second) if bent else ()):
            text = f"{term} is multiplied, in {expression}, by"
            yield named(node, "wrong_factor", 0.5, text, (CALL, do(scale_addend, which=which, c=1.0)), free=1.0)


def _exclusive(node: Node, nodes: Sequence[Node]) -> bool:
    """Whether it is cumsum(x) - x, an exclusive prefix sum."""
    if not node.name.startswith("sub") or len(node.makers) != 2:
        return False
    maker = maker_of(nodes, node.makers[0])
    return maker is not None and maker.name == "cumsum" and maker.makers[:1] == node.makers[1:]


def _products(node: Node) -> Iterator[NamedEdit]:
    """a b and a / b: a factor missing, applied twice, or dividing where it should multiply."""
    division, expression = node.name.startswith("div"), node.expression
    for keep, other in ((0, 1),) if division else ((0, 1), (1, 0)):
        value = node.args[other]
        if isinstance(value, Tensor) and not value.is_floating_point():
            continue
        name, scalar = _name(node, other), not isinstance(value, Tensor)
        inverse, power = (name, f"1/{name}") if division else (f"1/{name}", name)
        if not scalar or isinstance(node.args[keep], Tensor):
            cause, also = ("wrong_mask", ("wrong_factor",)) if masks(value) else ("wrong_factor", ())
            drop = CALL, do(drop_factor, keep=keep)
            text = f"{name} is left out of {expression}"
            yield named(node, cause, 0.8, text, drop, also=also, factor=name, named=inverse)
        text, again = f"{name} enters {expression} twice", do(repeat_factor, other=other, divide=division, times=1)
        yield named(node, "wrong_factor", 0.75, text, (CALL, again), factor=name, named=power)
        if floating(value) or scalar and value:
            text = f"{name} {'multiplies' if division else 'divides'} in {expression}"
            inverted = CALL, do(repeat_factor, other=other, divide=not division, times=2)
            yield named(node, "wrong_factor", 0.5, text, inverted, factor=name, named=f"{power}^2" if not division
                        else f"{name}^2")  # fmt: skip
        if scalar and isinstance(value, float | int):
            text = f"{expression} is multiplied by"
            yield named(node, "wrong_factor", 0.45, text, (RESULT, do(scale, c=1.0)), free=1.0)


def _counts(node: Node) -> Iterator[NamedEdit]:
    """A number of places, such as a distance, used as a factor and off by one."""
    for i, a in enumerate(node.args[:2]):
        if whole(a) and a.numel() > 1 and floating(node.out):
            for step, how in ((1, "one more"), (-1, "one less")):
                text = f"{node.operand(i) or 'a number'} is {how} in {node.expression}"
                yield named(node, "off_by_one", 0.55, text, (i, do(plus, c=step)), also=("wrong_factor", "shifted"),
                            operand=node.operand(i), step=step)  # fmt: skip


def _biased(node: Node) -> Iterator[NamedEdit]:
    name, expression = _name(node, 0), node.expression
    drop = CALL, do(without_bias, of=_BIASED[node.name])
    yield named(node, "missing_term", 0.8, f"{name} is left out of {expression}", drop, term=name)
    text = f"{name} has the other sign in {expression}"
    yield named(node, "sign_flip", 0.7, text, (0, do(scale, c=-1)), term=name)
    text = f"{name} is added twice in {expression}"
    yield named(node, "repeated_term", 0.6, text, (0, do(scale, c=2)), term=name, times=2)


def _functions(node: Node) -> Iterator[NamedEdit]:
    """Another rounding, another activation, another constant, a function that the golden does not take."""
    mine, expression = node.name.rstrip("_"), node.expression
    if mine in ROUNDINGS:
        for name, of in ROUNDINGS.items():
            if name != mine:
                cause = "truncating_store" if name in ("trunc", "floor") else "scale_bias"
                text = f"{name} stands where {expression} has {mine}"
                yield named(node, cause, 0.6, text, (CALL, do(function, of=of)), function=name)
        yield named(node, "missing_term", 0.55, f"{expression} is left out", (CALL, do(unchanged)), function=mine)
    if mine in ACTIVATIONS and floating(node.args[0]):
        own = "gelu by tanh" if mine == "gelu" and node.kwargs.get("approximate") == "tanh" else mine
        for name, of in ACTIVATIONS.items():
            if name != own:
                text = f"{name} stands where the golden has {own}, of {node.operand(0) or 'an operand'}"
                yield named(node, "wrong_factor", 0.4, text, (CALL, do(function, of=of)), function=name)
    if node.name in ("mul", "div") and len(node.args) > 1 and isinstance(node.args[1], int | float):
        yield from _constants(node, float(node.args[1]))
    if not node.backward and node.name in _WRAPS and floating(node.out) and node.out.numel():
        if bool(((node.out >= 0) & (node.out <= 1)).all()):  # a share whose complement is taken
            text = f"1 - {expression} stands in place of {expression}"
            yield named(node, "swapped_results", 0.45, text, (RESULT, do(applied, of=partial(torch.rsub, other=1))),
                        also=("wrong_factor", "missing_term"), factor=expression, term=expression)  # fmt: skip
        for name, cause, of in WRAPPED:
            if not node.name.startswith(name):
                text = f"{name} is taken of {expression}, and the golden takes none"
                wrap = RESULT, do(applied, of=of)
                yield named(node, cause, 0.25, text, wrap, also=("repeated_term",), function=name)


def _constants(node: Node, number: float) -> Iterator[NamedEdit]:
    """Changes of constants for goldens that round afterwards, where no gradient leads to the best number."""
    if number != round(number) or abs(number) < 3:
        return
    power = 2.0 ** round(torch.tensor(abs(number)).log2().item())
    for other in dict.fromkeys((number + 1, number - 1, power, power - 1, 2 * number, number / 2)):
        if other != number:
            text = f"{other:g} stands for {number:g} in {node.expression}"
            params: dict[str, Any] = {"factor": f"{other:g}", "named": f"{other:g}/{number:g}", "value": other / number}
            yield named(node, "wrong_factor", 0.55, text, (1, do(constant, new=other)),
                        also=("scale_bias", "off_by_one"), **params)  # fmt: skip


def _divisors(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    """A divisor that is shifted by a number, or one divisor for all with a wrong factor."""
    if not _divides(node) or len(list(islice(filter(_divides, nodes), _DIVISIONS + 1))) > _DIVISIONS:
        return
    single = node.args[1].numel() == 1
    text = f"the divisor {node.operand(1) or 'of ' + node.expression} in {node.expression} is shifted by"
    yield named(node, "absolute_eps", 0.45 if single else 0.5, text, (1, do(plus, c=0.0)), free=0.0)
    if single:
        text = f"{node.expression}, which has one divisor for all, is multiplied by"
        yield named(node, "wrong_factor", 0.5, text, (RESULT, do(scale, c=1.0)), free=1.0)


def _divides(node: Node) -> bool:
    return not node.backward and node.name in ("div", "div_") and len(node.args) > 1 and floating(node.args[1])


def _placed_factors(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    """A factor after a function instead of before it; a negated factor left out, and its sign stays."""
    if node.name in _MOVED_FACTORS and floating(node.args[0]):
        for name, c in _factors(nodes, node):
            text = f"{name} is a factor after {node.name}, not before"
            yield named(node, "wrong_factor", 0.5, text, (CALL, do(scale_after, c=c)), factor=name)
    if node.name in ("mul", "div") and len(node.makers) == 2:
        for i, key in enumerate(node.makers):
            negated = maker_of(nodes, key)
            if negated is not None and negated.name == "neg" and not (node.name == "div" and not i):
                name = negated.operand(0) or "what is negated"
                text = f"{name} is left out of {node.expression}, and its sign stays"
                drop = (CALL, do(drop_factor, keep=1 - i)), (RESULT, do(applied, of=torch.neg))
                yield named(node, "wrong_factor", 0.75, text, *drop, factor=name, named=f"1/{name}")
    if node.name == "neg" and floating(node.out) and node.out.numel() > 1:
        name = node.operand(0) or "what is negated"
        text = f"{name} counts as one in {node.expression}"
        as_one = 0, do(applied, of=torch.ones_like)
        yield named(node, "wrong_factor", 0.5, text, as_one, factor=name, named=f"1/{name}")


def _factors(nodes: Sequence[Node], node: Node, depth: int = 4) -> list[tuple[str, float]]:
    """Numbers by which the argument was multiplied or divided before."""
    factors: list[tuple[str, float]] = []
    at = node
    while depth and at.makers:
        before, depth = maker_of(nodes, at.makers[0]), depth - 1
        if before is None or before.name not in ("mul", "div", "_unsafe_view", "masked_fill", "mm", "bmm"):
            break
        at = before
        other = at.args[1]
        if isinstance(other, Tensor) and floating(other) and other.numel() == 1:
            other = float(other)
        if at.name in ("mul", "div") and isinstance(other, int | float) and other:
            factors.append((at.operand(1) or "a factor", 1.0 / other if at.name == "div" else float(other)))
    return factors
