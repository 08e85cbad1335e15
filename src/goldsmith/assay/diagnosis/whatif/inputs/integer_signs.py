"""Small integers read with a sign that they do not have, or without the sign that they have.

two's complement      v - 2^b where v >= 2^(b - 1)
sign and magnitude    (-1)^(top bit) (the other bits)
without a sign        v mod 2^b
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating, replaced, whole
from ..change import Change, with_arguments

_BITS = (2, 3, 4, 5, 6, 8)
_READ = frozenset("_to_copy mul sub add div".split())  # operators that turn integers into other numbers
Read = Callable[[Tensor], Tensor]


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.name not in _READ or not floating(call.out):
        return
    for i, t in enumerate(call.args[:2]):
        if not whole(t) or t.numel() < 2:
            continue
        name = call.operand(i) or "the stored numbers"
        for text, read in _read_otherwise(t):
            change = with_arguments(lambda args, i=i, read=read: replaced(args, i, read(args[i].long())))
            yield Change("wrong_format", f"{name} is read {text}", call.index, change, {"input": name}, 0.5)


def _read_otherwise(t: Tensor) -> Iterator[tuple[str, Read]]:
    least, most = int(t.min()), int(t.max())
    bits = next((b for b in _BITS if -(1 << b - 1) <= least and most < 1 << b - (least < 0)), 0)
    if not bits:
        return
    top = 1 << bits - 1
    if least < 0:
        yield f"as {bits} bits without a sign", lambda t: t % (2 * top)
    elif most >= top:
        yield f"as {bits} bits with a sign", lambda t: t - 2 * top * (t >= top)
        yield f"as a sign and {bits - 1} bits", lambda t: (t % top) * (1 - 2 * (t >= top).long())
