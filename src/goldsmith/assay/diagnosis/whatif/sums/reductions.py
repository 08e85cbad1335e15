"""Sums, means, maxima, softmax and matrix products: cut short, over another axis, padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating, replaced
from ..change import Change, instead, with_arguments, with_result
from ..operators import log_bases
from . import reduction_axes

_REDUCES = ("sum", "mean", "amax", "amin", "logsumexp", "prod", "linalg_vector_norm", "cumsum", "max", "argmax")
SMALL = (4, 2, 3)
BLOCKS = (8, 16, 32, 64, 128, 256)
_PRODUCTS = {"mm": (1, 0), "bmm": (2, 1), "dot": (0, 0), "mv": (1, 0), "addmm": (1, 0), "baddbmm": (2, 1)}


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.name in _REDUCES and call.args and floating(call.args[0]):
        yield from _reductions(call)
        yield from reduction_axes.changes(call, calls)
    if call.name in _PRODUCTS:
        yield from _products(call)
    if call.name in ("_softmax", "_log_softmax"):
        yield from _softmax(call)
    if call.name in ("_softmax", "_log_softmax", "logsumexp"):
        yield from log_bases.changes(call)


def cuts(n: int) -> dict[int, str]:
    """End positions at which a reduction over n may stop -> description."""
    ends = {n - 1: "one short"}
    for block in BLOCKS:
        ends.setdefault(n - n % block, f"the last part of a block of {block} is left out")
        ends.setdefault(block, f"the first block of {block} alone")
        ends.setdefault(n - block, f"one block of {block} short")
        ends.setdefault((n - 1) // block * block, f"the last block of {block} is left out")
    for block in SMALL:
        ends.setdefault((n - 1) // block * block, f"the last block of {block} is left out")
    ends.setdefault(n // 2, "the first half alone")
    return {k: why for k, why in ends.items() if 0 < k < n}


def starts(n: int) -> dict[int, str]:
    """Start positions -> description."""
    begins = {1: "from the second on"}
    for block in BLOCKS:
        begins.setdefault((n - 1) // block * block, f"the last block of {block} alone")
        begins.setdefault(block, f"without the first block of {block}")
    for block in SMALL:
        begins.setdefault((n - 1) // block * block, f"the last block of {block} alone")
    begins.setdefault(n // 2, "the second half alone")
    begins.setdefault(n - 1, "the last one alone")
    return {k: why for k, why in begins.items() if 0 < k < n}


def axes_of(call: Node) -> list[int]:
    """The axes of a reduction."""
    x = call.args[0]
    dims = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim")
    if call.name == "linalg_vector_norm":
        dims = call.args[2] if len(call.args) > 2 else None
    if isinstance(dims, bool) or dims is None:
        dims = list(range(x.dim()))
    axes = [dims] if isinstance(dims, int) else list(dims)
    return [a % x.dim() for a in axes] if x.dim() and axes else list(range(x.dim()))


def cut(name: str, operand: str, axis: int, n: int) -> Iterator[tuple[str, str, int, int, dict, float]]:
    """(cause, text, lo, hi, params, prior): the part of [0, n) that is left."""
    of = f"over {operand}" if operand else ""
    for k, why in cuts(n).items():
        one = k == n - 1 and n % 8 != 1
        cause, prior = ("off_by_one", 0.7) if one else ("truncated_reduction", 0.7)
        text = f"{name} runs {of} [0, {k}) of {n}: {why}".replace("  ", " ")
        yield cause, text, 0, k, {"input": operand, "axis": axis, "missing": [k, n]}, prior
    for k, why in starts(n).items():
        # a loop that loses its beginning seldom starts late: each iteration overwrites the one before
        cause = "off_by_one" if k == 1 and n > 2 else "overwritten_accumulator"
        text = f"{name} runs {of} [{k}, {n}) of {n}: {why}".replace("  ", " ")
        yield cause, text, k, n, {"input": operand, "axis": axis, "missing": [0, k]}, 0.6


def neutral(name: str) -> float:
    """The neutral element of a reduction."""
    if name in ("amax", "logsumexp", "max", "argmax"):
        return -torch.inf
    return torch.inf if name == "amin" else 1.0 if name == "prod" else 0.0


def only(x: Tensor, axis: int, lo: int, hi: int, fill: float) -> Tensor:
    """x with everything outside [lo, hi) of the axis replaced by the neutral element."""
    out = torch.full_like(x, fill)
    out.narrow(axis, lo, hi - lo).copy_(x.narrow(axis, lo, hi - lo))
    return out


def _reductions(call: Node) -> Iterator[Change]:
    x, axes = call.args[0], axes_of(call)
    operand, fill = call.operand(0), neutral(call.name)
    for axis in axes:
        n = x.shape[axis]
        for cause, text, lo, hi, params, prior in cut(call.name, operand, axis, n):

            def part(args: tuple, axis: int = axis, lo: int = lo, hi: int = hi) -> tuple:
                return replaced(args, 0, only(args[0], axis, lo, hi, fill))

            yield Change(cause, text, call.index, with_arguments(part), params, prior)
            if call.name == "mean":
                yield Change(cause, f"{text}, divided by what it runs over", call.index, _mean(part, n / (hi - lo)),
                             params, prior - 0.1)  # fmt: skip
    for i, (kind, (text, factor)) in enumerate(_counts(call, axes).items()):
        scale = with_result(lambda out, factor=factor: out * factor)
        yield Change("wrong_factor", text, call.index, scale, {"named": kind}, 0.5 - 0.01 * i)
    if call.name in ("sum", "mean", "amax", "logsumexp", "linalg_vector_norm", "cumsum"):
        yield from _other_axes(call, axes)
    if call.name == "amax":
        text = f"{call.expression} takes part of zeros: padding enters the maximum"
        yield Change(
            "wrong_mask", text, call.index, with_result(lambda out: out.clamp(min=0)), {"operator": call.name}, 0.7
        )
    if call.name in ("sum", "mean") and len(axes) == 1:
        yield from _repeats(call, axes[0])


def _mean(part: Callable[[tuple], tuple], factor: float) -> Any:
    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        return func(*part(args), **kwargs) * factor

    return run


def _counts(call: Node, axes: list[int]) -> dict[str, tuple[str, float]]:
    """Divided by the wrong number, or not at all."""
    n = 1
    for axis in axes:
        n *= call.args[0].shape[axis]
    if n < 2:
        return {}
    divisors = {}
    if call.name == "mean":
        divisors[str(n)] = (f"{call.expression} is not divided by its count {n}", float(n))
        divisors[f"{n}/{n - 1}"] = (f"{call.expression} is divided by {n - 1}, one less than its count", n / (n - 1))
        for block in BLOCKS:
            padded = -(-n // block) * block
            if padded != n:
                divisors.setdefault(
                    f"{n}/{padded}",
                    (
                        (f"{call.expression} is divided by {padded}, its count padded to {block}"),
                        n / padded,
                    ),
                )
    if call.name == "sum":
        divisors[f"1/{n}"] = (f"{call.expression} is divided by its count {n}", 1.0 / n)
    return divisors


def _other_axes(call: Node, axes: list[int]) -> Iterator[Change]:
    # the position of the axis among the arguments
    x, place = call.args[0], 2 if call.name == "linalg_vector_norm" else 1
    if x.dim() < 2:
        return
    yield from _more_or_fewer(call, axes)
    if len(axes) != 1:
        return
    for axis in range(x.dim()):
        if axis == axes[0] or x.shape[axis] < 2:
            continue

        def along(args: tuple, axis: int = axis) -> tuple:
            return replaced(args, place, [axis] if isinstance(args[place], list | tuple) else axis)

        if len(call.args) > place:
            text = f"{call.expression} runs along axis {axis} instead of {axes[0]}"
            params = {"input": call.operand(0), "axis": axis, "golden_axis": axes[0]}
            yield Change("wrong_axis", text, call.index, with_arguments(along), params, 0.7)
            share = x.shape[axes[0]] / x.shape[axis]
            text = f"{text}, and is divided by its length"
            yield Change("wrong_axis", text, call.index, _mean(along, share), params, 0.65)


_WHOLE = {"sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "linalg_vector_norm": torch.linalg.vector_norm}


def _more_or_fewer(call: Node, axes: list[int]) -> Iterator[Change]:
    """Along all axes in place of some, along one in place of several; the result broadcasts."""
    x, reduce = call.args[0], _WHOLE.get(call.name)
    others = [[a] for a in range(x.dim())] if len(axes) > 1 else [list(range(x.dim()))]
    others += [sorted([*axes, a]) for a in range(x.dim()) if a not in axes and len(axes) + 1 < x.dim()]
    if reduce is None or not isinstance(call.out, Tensor) or len(axes) == x.dim() == 1:
        return
    for other in others:

        def along(x: Tensor, *args: Any, other: list[int] = other, like: Tensor = call.out, **kwargs: Any) -> Tensor:
            out = reduce(x, dim=other, keepdim=True)
            return out.expand(x.shape).amax(axes).reshape(like.shape) if len(other) > len(axes) else out

        some = f"ax{'i' if len(other) == 1 else 'e'}s {', '.join(map(str, other))}"
        where = "all axes" if len(other) == x.dim() else some
        text = f"{call.expression} runs along {where} instead of {', '.join(map(str, axes))}"
        params = {"input": call.operand(0), "axis": other[0], "golden_axis": axes[0]}
        yield Change("wrong_axis", text, call.index, instead(along), params, 0.65)


def _repeats(call: Node, axis: int) -> Iterator[Change]:
    """The last element, or the remainder block, counted twice: clamped indices instead of a mask."""
    n = call.args[0].shape[axis]
    for block in BLOCKS:
        pad = -n % block
        if pad and n > 1:

            def padded(args: tuple, pad: int = pad) -> tuple:
                x = args[0]
                last = x.narrow(axis, x.shape[axis] - 1, 1)
                return replaced(args, 0, torch.cat([x, last.expand([pad if d == axis else s for d, s in
                                                                    enumerate(x.shape)])], axis))  # fmt: skip

            if call.name == "sum":
                text = (
                    f"{call.expression} counts the last element {pad + 1} times: "
                    f"the block of {block} is clamped, not masked"
                )
                yield Change("wrong_mask", text, call.index, with_arguments(padded), {"axis": axis}, 0.4)


def repeated(call: Node) -> list[Change]:
    """A product that counts several times; used for groups only, since a single product is a fitted term."""
    if call.name not in ("mm", "bmm") or not floating(call.out):
        return []

    def times(c: float) -> object:
        return with_result(lambda out: out * c)

    return [Change("repeated_term", f"{call.expression} is multiplied by", call.index, times, {}, 0.6, free=1.0)]


def _products(call: Node) -> Iterator[Change]:
    left, right = _PRODUCTS[call.name]
    first = 1 if call.name in ("addmm", "baddbmm") else 0
    a, b = call.args[first], call.args[first + 1]
    if not floating(a) or not floating(b):
        return
    n = a.shape[left]
    operand = call.operand(first) or call.operand(first + 1)
    for cause, text, lo, hi, params, prior in cut(call.name, operand, left, n):

        def part(args: tuple, lo: int = lo, hi: int = hi) -> tuple:
            args = replaced(args, first, only(args[first], left, lo, hi, 0.0))
            return replaced(args, first + 1, only(args[first + 1], right, lo, hi, 0.0))

        yield Change(cause, text, call.index, with_arguments(part), params, prior)
    if all(t.dim() >= 2 and t.shape[-1] == t.shape[-2] > 1 for t in (a, b)):
        both = with_arguments(
            lambda args: replaced(replaced(args, first, args[first].mT), first + 1, args[first + 1].mT)
        )
        text = f"both operands of {call.expression} are transposed"
        yield Change("transposed", text, call.index, both, {"operand": "both"}, 0.6)
    for i, t in ((first, a), (first + 1, b)):
        if t.dim() >= 2 and t.shape[-1] == t.shape[-2] > 1:
            flip = with_arguments(lambda args, i=i: replaced(args, i, args[i].mT))
            name = call.operand(i) or "an operand"
            yield Change(
                "transposed", f"{name} is transposed in {call.expression}", call.index, flip, {"operand": name}, 0.75
            )
        elif t.dim() >= 2 and min(t.shape[-2:]) > 1:
            name = call.operand(i) or "an operand"
            for text, read in strides_exchanged(name):
                change = with_arguments(lambda args, i=i, read=read: replaced(args, i, read(args[i])))
                yield Change("wrong_stride", f"{text} in {call.expression}", call.index, change, {"operand": name}, 0.6)


def strides_exchanged(name: str) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """The last two axes read with each other's strides, and also as if the matrix were the transposed one."""
    return [
        (f"the strides of {name} stand in each other's place", _across),
        (f"the strides of {name} are exchanged", lambda t: t.mT.reshape(t.shape)),
        (
            f"{name} is read as if its axes were exchanged",
            lambda t: t.reshape(*t.shape[:-2], t.shape[-1], t.shape[-2]).mT,
        ),
    ]


def _across(t: Tensor) -> Tensor:
    """t[i, j] read at offset i + j * columns of the flat memory; NaN beyond its end, where anything may lie."""
    rows, columns = t.shape[-2:]
    at = torch.arange(rows, device=t.device)[:, None] + torch.arange(columns, device=t.device) * columns
    first = torch.arange(t.numel() // (rows * columns), device=t.device) * (rows * columns)
    place = first.reshape(*t.shape[:-2], 1, 1) + at
    return t.flatten()[place.clamp(max=t.numel() - 1)].masked_fill(place >= t.numel(), torch.nan)


# softmax

_STORED = ("overwritten_accumulator", "truncated_reduction")


def _softmax(call: Node) -> Iterator[Change]:
    x, axis = call.args[0], call.args[1] % max(call.args[0].dim(), 1)
    n, name = x.shape[axis], call.name
    log = name == "_log_softmax"
    for cause, text, lo, hi, params, prior in cut("the sum of the softmax", call.operand(0), axis, n):

        def part(x: Tensor, *args: Any, lo: int = lo, hi: int = hi) -> Tensor:
            total = torch.logsumexp(x.narrow(axis, lo, hi - lo), axis, keepdim=True)
            return x - total if log else torch.exp(x - total)

        yield Change(cause, text, call.index, instead(part), params, prior)
        alone = with_arguments(lambda args, lo=lo, hi=hi: replaced(args, 0, only(args[0], axis, lo, hi, -torch.inf)))
        text = text.replace("the sum of the softmax", call.expression)
        yield Change(cause, text, call.index, alone, params, prior)

    def stored(x: Tensor, *args: Any) -> Tensor:
        total = x.narrow(axis, x.shape[axis] - 1, 1)
        return x - total if log else torch.exp(x - total)

    text = (
        f"of the addends of the sum of {call.expression} the last one is left: a store stands where an addition should"
    )
    yield Change("lost_update", text, call.index, instead(stored), {"axis": axis}, 0.6, also=_STORED)
    for width in dict.fromkeys(_widths(n)):

        def padded(x: Tensor, *args: object, count: int = width - n) -> Tensor:
            total = torch.logaddexp(torch.logsumexp(x, axis, keepdim=True), torch.tensor(float(count)).double().log())
            return x - total if log else torch.exp(x - total)

        text = f"{width - n} zeros take part in {call.expression}: its tail up to {width} is not masked"
        params = {"axis": axis, "padded": width}
        yield Change("wrong_mask", text, call.index, instead(padded), params, 0.75)
    other = with_arguments(lambda args: replaced(args, 1, (axis - 1) % args[0].dim()))
    if x.dim() > 1:
        text = f"{call.expression} runs along axis {(axis - 1) % x.dim()} instead of {axis}"
        yield Change("wrong_axis", text, call.index, other, {"axis": (axis - 1) % x.dim(), "golden_axis": axis}, 0.65)
    for other_axis in (d for d in range(x.dim()) if d != axis and x.shape[d] > 1):

        def across(x: Tensor, *args: object, d: int = other_axis) -> Tensor:
            away = x - x.amax(axis, keepdim=True)
            total = torch.logsumexp(away, d, keepdim=True)
            return away - total if log else torch.exp(away - total)

        text = f"the sum of {call.expression} runs along axis {other_axis} instead of {axis}, its maximum along {axis}"
        yield Change("wrong_axis", text, call.index, instead(across), {"axis": other_axis, "golden_axis": axis}, 0.6)
    if not log:
        keep = instead(lambda x, *a: torch.exp(x - x.amax(axis, keepdim=True)))
        yield Change("wrong_factor", f"{call.expression} is not divided by its sum", call.index, keep, {}, 0.55)


def _widths(n: int) -> Iterator[int]:
    yield 1 << max(n - 1, 1).bit_length() if n & (n - 1) else n * 2
    for block in BLOCKS:
        if -n % block:
            yield n + -n % block
