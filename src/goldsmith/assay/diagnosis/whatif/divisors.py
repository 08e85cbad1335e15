"""A small number that is added to what is divided by: a / (b + c), at one division or at all of a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .calls import Call, Change, Changed, floating, given, replaced

_MOST = 64  # a loop's divisions are too many to ask one by one


def changes(call: Call, calls: Sequence[Call] = ()) -> Iterator[Change]:
    if call.backward or call.name not in ("div", "div_") or len(call.args) < 2 or not floating(call.args[1]):
        return
    if len(calls) > _MOST * _MOST or bool((call.args[1] == 0).all()):
        return

    def inside(c: float) -> Changed:
        return given(lambda args: replaced(args, 1, args[1] + c))

    text = f"the divisor {call.operand(1) or 'of ' + call.said} in {call.said} is shifted by"
    yield Change("absolute_eps", text, call.index, inside, {}, 0.5, free=0.0)
