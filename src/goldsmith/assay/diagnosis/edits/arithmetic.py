"""Sums, products and functions of elements: an addend or a factor dropped, repeated, or with the other sign."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from ..graph.node import Key, Node
from ..graph.tensors import floating, masks, whole
from .epsilons import ROOTS
from .golden_edit import CALL, RESULT, NamedEdit, do, named
from .primitives.formulas import (
    DERIVATIVES,
    applied,
    drop_factor,
    formula,
    function,
    plus,
    repeat_factor,
    scale_inner_product,
    unchanged,
    weigh_addends,
    without_bias,
)
from .primitives.tensors import scale

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
# for integers, which positions are made of, the same mistakes have other names
_OF_PLACES = {"missing_term": "invalid_index", "repeated_term": "invalid_index", "wrong_factor": "wrong_stride"}
_DIVISIONS = 16  # each needs a search for a number, and a loop has too many


def edits(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    for edit in _elementwise(node, nodes):
        other = _OF_PLACES.get(edit.cause) if whole(node.out) else None
        if other == "invalid_index" and any(a in (1, -1) for a in node.args[:2] if isinstance(a, int)):
            other = "off_by_one"
        yield edit if other is None else replace(edit, cause=other, also=(edit.cause, *edit.also))
    yield from _divisors(node, nodes)


def _name(node: Node, i: int) -> str:
    return node.operand(i) or f"an operand of {node.name}"


def _maker(nodes: Sequence[Node], key: Key) -> Node | None:
    return nodes[key] if isinstance(key, int) and 0 <= key < len(nodes) else None


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


def _exclusive(node: Node, nodes: Sequence[Node]) -> bool:
    """Whether it is cumsum(x) - x, an exclusive prefix sum."""
    if not node.name.startswith("sub") or len(node.makers) != 2:
        return False
    maker = _maker(nodes, node.makers[0])
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
