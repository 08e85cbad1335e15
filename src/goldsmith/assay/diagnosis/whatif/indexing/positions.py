"""Positions counted from another origin or from the other end, and sizes of the case that are off by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from ...edits.primitives.positions import cast_through, wraps
from ...graph.node import Node
from ...graph.tensors import floating, replaced
from ..change import Change, with_arguments, with_result

_SHIFTS = frozenset("__rshift__ __lshift__ bitwise_right_shift bitwise_left_shift pow".split())
_SIZES = 6
_MOST = 96  # operators


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    """Changes of `arange`: a range from 1 that is read from 0 is off by one; a range from 0 is shifted."""
    if call.name != "arange" or call.out.numel() < 2:
        return
    first = float(call.out[0])
    for step, how in ((1, "one too late"), (-1, "one too early")):
        text = f"{call.expression} begins {how}"
        cause, also = ("off_by_one", "shifted") if first == 1 else ("shifted", "off_by_one")
        change = with_result(lambda t, s=step: t + s)
        yield Change(cause, text, call.index, change, {"step": step}, 0.45, also=(also,))
    for bits, dtype in wraps(call.out):
        text = f"{call.expression} wraps at {bits} bits"
        yield Change(
            "index_overflow", text, call.index, with_result(partial(cast_through, dtype=dtype)), {"bits": bits}, 0.6
        )
    of_bits = any(call.index in c.makers and c.name in _SHIFTS for c in calls)
    cause, also = ("wrong_format", "permuted") if of_bits else ("permuted", "wrong_format")
    text = f"{call.expression} counts down where it should count up"
    yield Change(cause, text, call.index, with_result(lambda t: t.flip(0)), {}, 0.45, also=(also,))


def steps(calls: Sequence[Node], among: set[int], numbers: Mapping[str, object]) -> Iterator[Change]:
    """A constant derived from a size of the case, such as a grid step, with that size one higher or lower."""
    sizes = {k: n for k, n in numbers.items() if isinstance(n, int) and not isinstance(n, bool) and n > 2}
    count = 0
    for call in calls:
        if call.index not in among or call.backward or call.name.rstrip("_") not in ("mul", "div"):
            continue
        if len(call.args) < 2 or not isinstance(call.args[1], float) or not floating(call.out):
            continue
        if call.args[1] in (0.0, 1.0, -1.0) or (count := count + 1) > _MOST:
            continue
        for k, n in list(sizes.items())[:_SIZES]:
            for up, down in ((n - 1, n), (n, n - 1), (n + 1, n), (n, n + 1)):
                label = f"{k}" if up == n else f"({k} {up - n:+d})"
                over = f"{k}" if down == n else f"({k} {down - n:+d})"
                text = f"{call.args[1]:g} in {call.expression} is {label} / {over} of it"
                change = with_arguments(lambda args, c=up / down: replaced(args, 1, args[1] * c))
                params = {"factor": f"{label} / {over}", "named": f"{label}/{over}", "value": up / down}
                yield Change("wrong_factor", text, call.index, change, params, 0.5, also=("off_by_one",))
