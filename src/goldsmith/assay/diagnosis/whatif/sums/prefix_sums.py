"""Prefix sums, products and logsumexps that a kernel computes in blocks: wrong values carried over between blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..run.calls import Change, OperatorCall, floating, instead
from .reductions import BLOCKS

_NEUTRAL = {"cumsum": 0.0, "cumprod": 1.0, "logcumsumexp": -torch.inf}
_WHOLE: dict[str, Callable[..., Tensor]] = {"cumsum": torch.sum, "cumprod": torch.prod, "logcumsumexp": torch.logsumexp}


def changes(call: OperatorCall, calls: Sequence[OperatorCall] = ()) -> Iterator[Change]:
    if call.name not in _NEUTRAL or len(call.args) < 2 or not floating(call.args[0]) or not call.args[0].dim():
        return
    axis = call.args[1] % call.args[0].dim()
    n = call.args[0].shape[axis]
    for block in (2, 4, *BLOCKS):
        if block < n:
            yield from _carried(call, axis, block, 0)
            yield from _carried(call, axis, block, 1)  # the initial value precedes the first block
            yield _windowed(call, axis, block)
            yield from (_short(call, axis, block, first) for first in (0, 1) if block > 2)
    if n > 1:
        yield from _moved(call, axis)


def _carried(call: OperatorCall, axis: int, block: int, first: int) -> Iterator[Change]:
    """Nothing is carried over, or only the previous block's own total; the first block is longer by `first`."""
    n = call.args[0].shape[axis]
    sizes = [min(block + first, n), *(min(block, n - at) for at in range(block + first, n, block))]

    def begun_anew(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.cat([call.func(part, axis) for part in x.split(sizes, axis)], axis)

    def from_one(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        parts = x.split(sizes, axis)
        scanned = [call.func(parts[0], axis)]
        for before, part in zip(parts, parts[1:], strict=False):
            own = before.narrow(axis, before.shape[axis] - block, block)
            both = call.func(torch.cat((own, part), axis), axis)
            scanned.append(both.narrow(axis, block, part.shape[axis]))
        return torch.cat(scanned, axis)

    params = {"axis": axis, "block": block}
    text = f"{call.expression} begins anew in every block of {block}"
    yield Change("missing_term", text, call.index, instead(begun_anew), params, 0.6,
                 also=("truncated_reduction", "overwritten_accumulator"))  # fmt: skip
    text = f"a block of {block} of {call.expression} takes over only the own result of the one before it"
    yield Change("overwritten_accumulator", text, call.index, instead(from_one), params, 0.6,
                 also=("truncated_reduction", "missing_term"))  # fmt: skip


def _short(call: OperatorCall, axis: int, block: int, first: int) -> Change:
    """Blocks are scanned by doubling without the last round, and carry over the values at their ends."""
    neutral, whole, reach = _NEUTRAL[call.name], _WHOLE[call.name], block // 2

    def rounds(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        scanned = [x.narrow(axis, 0, first)] if first else []
        for part in x.narrow(axis, first, x.shape[axis] - first).split(block, axis):
            before = part.new_full([reach - 1 if d == axis else s for d, s in enumerate(part.shape)], neutral)
            own = whole(torch.cat([before, part], axis).unfold(axis, reach, 1), -1)
            carry = scanned[-1].narrow(axis, scanned[-1].shape[axis] - 1, 1).expand(own.shape) if scanned else None
            scanned.append(own if carry is None else whole(torch.stack((own, carry)), 0))
        return torch.cat(scanned, axis)

    text = f"in blocks of {block} {call.expression} lacks its last round: terms {reach} places back or farther are lost"
    return Change("truncated_reduction", text, call.index, instead(rounds), {"axis": axis, "block": block}, 0.55,
                  also=("off_by_one", "missing_term"))  # fmt: skip


def _windowed(call: OperatorCall, axis: int, width: int) -> Change:
    """A doubling scan whose later rounds are missing."""
    neutral, whole = _NEUTRAL[call.name], _WHOLE[call.name]

    def window(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        before = x.new_full([width - 1 if d == axis else s for d, s in enumerate(x.shape)], neutral)
        return whole(torch.cat([before, x], axis).unfold(axis, width, 1), -1)

    text = f"{call.expression} reaches back over {width} places alone: a scan that lacks its last rounds"
    return Change("truncated_reduction", text, call.index, instead(window), {"axis": axis, "reach": width}, 0.55,
                  also=("off_by_one", "missing_term"))  # fmt: skip


def _moved(call: OperatorCall, axis: int) -> Iterator[Change]:
    def exclusive(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = call.func(x, axis).roll(1, axis)
        result.select(axis, 0).fill_(_NEUTRAL[call.name])
        return result

    def backwards(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return call.func(x.flip(axis), axis).flip(axis)

    text = f"{call.expression} leaves out each place's own number"
    yield Change("off_by_one", text, call.index, instead(exclusive), {"axis": axis}, 0.6, also=("shifted",))
    text = f"{call.expression} runs from the end"
    yield Change("permuted", text, call.index, instead(backwards), {"axis": axis}, 0.5, also=("transposed",))
