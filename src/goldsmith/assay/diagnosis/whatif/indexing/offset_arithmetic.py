"""Wrong integer arithmetic in an index: one operator of its offset computation is changed.

An offset is base + row * stride + column, brought into a range and cut to a width. Kernels use a stride that is one
less, begin a window one early, or keep a hash in 32 bits with a sign. A base or a row that is left out is covered by
`elementwise`; this module changes the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import whole
from ..change import Change, instead, with_result

_ADDS, _SUBS = frozenset("add add_".split()), frozenset("sub sub_ rsub".split())
_MULS, _DIVS = frozenset("mul mul_".split()), frozenset("floor_divide div div_".split())
_RESTS = frozenset("remainder remainder_ fmod".split())
_CUT = frozenset("bitwise_and bitwise_xor bitwise_or __and__ __xor__ __lshift__ bitwise_left_shift".split())
_ALL = _ADDS | _SUBS | _MULS | _DIVS | _RESTS | _CUT
_OTHER_CAUSES = ("off_by_one", "mask_shift", "invalid_index")
Made = Callable[[Tensor], Tensor]


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.backward or call.name not in _ALL or not whole(call.out) or call.out.numel() < 2 or len(call.args) < 2:
        return
    yield from _wrapped(call)
    number = call.args[1]
    if isinstance(number, int) and not isinstance(number, bool):
        if call.name in _ADDS | _SUBS:
            yield from _off_by_one(call)
        if call.name in _MULS and abs(number) > 1:
            yield from _strides(call, number)
        if call.name in _DIVS | _RESTS and number > 1:
            yield from _divided(call, number)


def _wrapped(call: Node) -> Iterator[Change]:
    """Cut to a width with or without a sign: larger values become negative, or wrap around."""
    top, low = int(call.out.max()), int(call.out.min())
    for dtype in (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32):
        info = torch.iinfo(dtype)
        if top <= info.max and low >= info.min or info.min == 0 and low < 0:
            continue
        span, least = 1 << info.bits, info.min
        change = with_result(lambda t, n=span, lo=least: (t - lo) % n + lo)
        how = "with a sign" if least else "without one"
        text = f"{call.expression} is kept in {info.bits} bits {how}"
        yield Change("index_overflow", text, call.index, change, {"bits": info.bits}, 0.6, also=("invalid_index",))


def _off_by_one(call: Node) -> Iterator[Change]:
    """Every index is one too low or one too high."""
    for step, how in ((-1, "low"), (1, "high")):
        text = f"{call.expression} is one too {how}"
        change = with_result(lambda t, s=step: t + s)
        yield Change("shifted", text, call.index, change, {"step": step}, 0.45, also=_OTHER_CAUSES)


def _strides(call: Node, number: int) -> Iterator[Change]:
    for other, how in ((number - 1, "one less"), (number + 1, "one more")):
        if other:
            text = f"the stride {number} in {call.expression} is {how}, {other}"
            change = instead(lambda x, *a, c=other, **k: x * c)
            params = {"stride": number, "read": other}
            yield Change("wrong_stride", text, call.index, change, params, 0.5, also=("invalid_index", "off_by_one"))


def _divided(call: Node, number: int) -> Iterator[Change]:
    """n // c and n % c: one in place of the other, the c of a neighbour, or neither."""
    rest = call.name in _RESTS
    kinds: list[tuple[str, str, Made]] = [
        ("wrong_stride", f"{c} stands where {number} should", _of(rest, c)) for c in (number - 1, number + 1) if c > 1
    ]
    kinds.append(("invalid_index", "the remainder is used as the quotient" if not rest else
                  "the quotient is used as the remainder", _of(not rest, number)))  # fmt: skip
    if rest:
        kinds.append(("invalid_index", "indices beyond the end count as the last", lambda x: x.clamp(0, number - 1)))
    for cause, how, make in kinds:
        also = ("wrong_stride" if cause == "invalid_index" else "invalid_index", "permuted")
        change = instead(lambda x, *a, make=make, **k: make(x))
        yield Change(cause, f"in {call.expression} {how}", call.index, change, {"number": number}, 0.45, also=also)


def _of(rest: bool, number: int) -> Made:
    return (lambda x: x % number) if rest else (lambda x: x.div(number, rounding_mode="floor"))
