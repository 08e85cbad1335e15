"""A small number added to a divisor, a / (b + c), at one division or at all divisions of a line.

If b is a single number, a / (b + c) is also a plain factor. The factor is the simpler explanation, unless it is close
to 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from ...graph.node import Changed, Node
from ...graph.tensors import floating, replaced
from ..change import Change, with_arguments, with_result

_MOST = 16  # divisions: each needs a search for a number, and a loop has too many


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if not _divides(call) or len(list(islice(filter(_divides, calls), _MOST + 1))) > _MOST:
        return

    def inside(c: float) -> Changed:
        return with_arguments(lambda args: replaced(args, 1, args[1] + c))

    single = call.args[1].numel() == 1
    text = f"the divisor {call.operand(1) or 'of ' + call.expression} in {call.expression} is shifted by"
    yield Change("absolute_eps", text, call.index, inside, {}, 0.45 if single else 0.5, free=0.0)
    if single:
        text = f"{call.expression}, which has one divisor for all, is multiplied by"
        yield Change("wrong_factor", text, call.index, _scaled, {}, 0.5, free=1.0)


def _scaled(c: float) -> Changed:
    return with_result(lambda out: out * c)


def _divides(call: Node) -> bool:
    return not call.backward and call.name in ("div", "div_") and len(call.args) > 1 and floating(call.args[1])
