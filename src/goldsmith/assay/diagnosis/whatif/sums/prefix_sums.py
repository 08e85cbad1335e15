"""Prefix sums, products and logsumexps that a kernel computes in blocks: wrong values carried over between blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating
from ..change import Change, instead
from .reductions import BLOCKS

_NEUTRAL = {"cumsum": 0.0, "cumprod": 1.0, "logcumsumexp": -torch.inf}
_REDUCE: dict[str, Callable[..., Tensor]] = {
    "cumsum": torch.sum,
    "cumprod": torch.prod,
    "logcumsumexp": torch.logsumexp,
}


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.name not in _NEUTRAL or len(call.args) < 2 or not floating(call.args[0]) or not call.args[0].dim():
        return
    axis = call.args[1] % call.args[0].dim()
    n = call.args[0].shape[axis]
    for block in (2, 4, *BLOCKS):
        if block < n:
            yield from _carried(call, axis, block, 0)
            yield from _carried(call, axis, block, 1)  # the initial value precedes the first block
            yield _without_later_rounds(call, axis, block)
            yield from (_without_last_round(call, axis, block, first) for first in (0, 1) if block > 2)
    if n > 1:
        yield from _shifted_or_reversed(call, axis)


def _carried(call: Node, axis: int, block: int, first: int) -> Iterator[Change]:
    """Each block carries over nothing, or only the previous block's own total; the first one is longer by `first`."""
    n = call.args[0].shape[axis]
    sizes = [min(block + first, n), *(min(block, n - at) for at in range(block + first, n, block))]

    def restarted(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return torch.cat([call.func(part, axis) for part in x.split(sizes, axis)], axis)

    def from_previous_block(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        parts = x.split(sizes, axis)
        scanned = [call.func(parts[0], axis)]
        for before, part in zip(parts, parts[1:], strict=False):
            own = before.narrow(axis, before.shape[axis] - block, block)
            both = call.func(torch.cat((own, part), axis), axis)
            scanned.append(both.narrow(axis, block, part.shape[axis]))
        return torch.cat(scanned, axis)

    params = {"axis": axis, "block": block}
    text = f"{call.expression} restarts in every block of {block}"
    yield Change("missing_term", text, call.index, instead(restarted), params, 0.6,
                 also=("truncated_reduction", "overwritten_accumulator"))  # fmt: skip
    text = f"each block of {block} of {call.expression} carries over only the previous block's own total"
    yield Change("overwritten_accumulator", text, call.index, instead(from_previous_block), params, 0.6,
                 also=("truncated_reduction", "missing_term"))  # fmt: skip


def _without_last_round(call: Node, axis: int, block: int, first: int) -> Change:
    """Each block's doubling scan misses its last round: it covers block // 2 places. Its last value is carried on."""
    neutral, reduce, reach = _NEUTRAL[call.name], _REDUCE[call.name], block // 2

    def rounds(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        scanned = [x.narrow(axis, 0, first)] if first else []
        for part in x.narrow(axis, first, x.shape[axis] - first).split(block, axis):
            before = part.new_full([reach - 1 if d == axis else s for d, s in enumerate(part.shape)], neutral)
            own = reduce(torch.cat([before, part], axis).unfold(axis, reach, 1), -1)
            carry = scanned[-1].narrow(axis, scanned[-1].shape[axis] - 1, 1).expand(own.shape) if scanned else None
            scanned.append(own if carry is None else reduce(torch.stack((own, carry)), 0))
        return torch.cat(scanned, axis)

    text = f"each block of {block} of {call.expression} misses the last round: terms {reach} or more positions back"
    return Change("truncated_reduction", text, call.index, instead(rounds), {"axis": axis, "block": block}, 0.55,
                  also=("off_by_one", "missing_term"))  # fmt: skip


def _without_later_rounds(call: Node, axis: int, width: int) -> Change:
    """A doubling scan over the whole axis that misses its last rounds, so it covers only `width` places."""
    neutral, reduce = _NEUTRAL[call.name], _REDUCE[call.name]

    def window(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        before = x.new_full([width - 1 if d == axis else s for d, s in enumerate(x.shape)], neutral)
        return reduce(torch.cat([before, x], axis).unfold(axis, width, 1), -1)

    text = f"{call.expression} covers only the last {width} positions: the scan misses its last rounds"
    return Change("truncated_reduction", text, call.index, instead(window), {"axis": axis, "reach": width}, 0.55,
                  also=("off_by_one", "missing_term"))  # fmt: skip


def _shifted_or_reversed(call: Node, axis: int) -> Iterator[Change]:
    def exclusive(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        result = call.func(x, axis).roll(1, axis)
        result.select(axis, 0).fill_(_NEUTRAL[call.name])
        return result

    def backwards(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return call.func(x.flip(axis), axis).flip(axis)

    text = f"{call.expression} is exclusive: each position leaves out its own number"
    yield Change("off_by_one", text, call.index, instead(exclusive), {"axis": axis}, 0.6, also=("shifted",))
    text = f"{call.expression} runs from the end to the start"
    yield Change("permuted", text, call.index, instead(backwards), {"axis": axis}, 0.5, also=("transposed",))
