"""Convolutions, forward and backward: taps left out, reversed or overwriting each other; sums cut short."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...edits.reductions import cut
from ...graph.node import Changed, Node
from ...graph.tensors import floating, replaced
from ..change import Change, with_arguments

_DX, _DW, _DB = 0, 1, 2  # index among the results of torch's backward


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.name == "convolution" and floating(call.args[0]):
        yield from _forward(call)
    elif call.name == "convolution_backward" and floating(call.args[0]):
        yield from _backward(call)


def _forward(call: Node) -> Iterator[Change]:
    w, bias = call.args[1], call.args[2]
    name = call.operand(1) or "the kernel"
    for cause, text, other, prior in _kernels(w):
        change = with_arguments(lambda args, f=other: replaced(args, 1, f(args[1])))
        yield Change(cause, f"{name} is taken {text}", call.index, change, {"operand": name}, prior)
    for cause, prior, text, span, params in cut("the sum over channels", name, 1, w.shape[1]):
        lo, hi = span.of(w.shape[1])

        def part(args: tuple, lo: int = lo, hi: int = hi) -> tuple:
            kept = torch.zeros_like(args[1])
            kept[:, lo:hi] = args[1][:, lo:hi]
            return replaced(args, 1, kept)

        yield Change(cause, text, call.index, with_arguments(part), params, prior)
    if bias is not None:
        term = call.operand(2) or "the bias"
        text = f"{term} is left out of {call.expression}"
        yield Change(
            "missing_term", text, call.index, with_arguments(lambda args: replaced(args, 2, None)), {"term": term}, 0.7
        )
        twice = with_arguments(lambda args: replaced(args, 2, 2 * args[2]))
        yield Change("repeated_term", f"{term} is added twice", call.index, twice, {"term": term}, 0.6)


def _kernels(w: Tensor) -> Iterator[tuple[str, str, Callable[[Tensor], Tensor], float]]:
    """(cause, text, the changed kernel, prior)"""
    axes = list(range(2, w.dim()))
    ends: list[tuple[str, dict[int, int]]] = []
    for end, word in ((-1, "last"), (0, "first")):
        ends.append((f"without its {word} tap", dict.fromkeys(axes, end)))
        if len(axes) > 1:
            ends += [(f"without the {word} taps of axis {a}", {a: end}) for a in axes]
    for text, place in ends:
        at = tuple(place.get(a, slice(None)) for a in range(w.dim()))
        also = "off_by_one" if w.shape[axes[0]] > 1 else "truncated_reduction"
        yield also, text, lambda w, at=at: _without(w, at), 0.7  # type: ignore[misc]
    yield "permuted", "in reverse order: convolved, not correlated", lambda w: w.flip(axes), 0.7
    if len(axes) == 2 and w.shape[-1] == w.shape[-2] > 1:
        yield "transposed", "with its two axes transposed", lambda w: w.mT, 0.7
    if w.shape[0] == w.shape[1] > 1:
        yield "transposed", "with its channels transposed", lambda w: w.transpose(0, 1), 0.7


def _without(w: Tensor, at: tuple) -> Tensor:
    w = w.clone()
    w[at] = 0
    return w


def _backward(call: Node) -> Iterator[Change]:
    mask = call.args[10]
    if mask[_DX]:
        for cause, text, other, prior in _kernels(call.args[2]):
            change = _one(_DX, partial(_of_kernel, other))
            yield Change(cause, f"the gradient of the input takes the kernel {text}", call.index, change, {}, prior)
        for last in (True, False):
            which = "last" if last else "first"
            text = f"the gradient of the input is stored where it should be added: the {which} tap is left"
            change = _one(_DX, partial(_stored, last))
            yield Change("overwritten_accumulator", text, call.index, change, {"left": which}, 0.7)
    if mask[_DW]:
        for cause, text, pick in _batches(call.args[0].shape[0], "the gradient of the kernel"):
            yield Change(cause, text, call.index, _of_batch(_DW, pick), {"axis": 0}, 0.6)
    if mask[_DB]:
        for cause, text, pick in _batches(call.args[0].shape[0], "the gradient of the bias"):
            yield Change(cause, text, call.index, _of_batch(_DB, pick), {"axis": 0}, 0.6)
        places = _one(_DB, lambda func, args, kw: args[0].sum(0).flatten(1)[:, 0])
        text = "the gradient of the bias sums the batch at the first position alone"
        yield Change("truncated_reduction", text, call.index, places, {}, 0.4)


def _batches(n: int, of: str) -> Iterator[tuple[str, str, slice]]:
    if n > 1:
        yield "truncated_reduction", f"{of} uses only the first of {n} samples", slice(0, 1)
        yield "overwritten_accumulator", f"{of} uses only the last of {n} samples", slice(n - 1, n)
        yield "off_by_one", f"{of} leaves out the last of {n} samples", slice(0, n - 1)


def _of_batch(which: int, pick: slice) -> Changed:
    def summed(func: Any, args: tuple, kwargs: dict) -> Any:
        return func(args[0][pick], args[1][pick], *args[2:], **kwargs)[which]

    return _one(which, summed)


def _one(which: int, make: Callable[[Any, tuple, dict], Tensor]) -> Changed:
    """Changes one of the results and keeps the others."""

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        out = list(func(*args, **kwargs))
        out[which] = make(func, args, kwargs)
        return tuple(out)

    return run


def _of_kernel(other: Callable[[Tensor], Tensor], func: Any, args: tuple, kwargs: dict) -> Tensor:
    return func(*replaced(args, 2, other(args[2])), **kwargs)[_DX]


def _stored(last: bool, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """Of the taps that reach an input place only one survives: the last, or the first, in kernel order."""
    w = args[2]
    out = torch.zeros_like(args[1])
    taps = list(product(*(range(n) for n in w.shape[2:])))
    for tap in taps if last else reversed(taps):
        alone, reach = torch.zeros_like(w), torch.zeros_like(w)
        at: Any = (slice(None), slice(None), *tap)
        alone[at], reach[at] = w[at], 1
        value = func(*replaced(args, 2, alone), **kwargs)[_DX]
        reached = func(*replaced(replaced(args, 2, reach), 0, torch.ones_like(args[0])), **kwargs)[_DX]
        out = torch.where(reached != 0, value, out)
    return out
