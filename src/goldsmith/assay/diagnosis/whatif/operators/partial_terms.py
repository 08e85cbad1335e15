"""A factor or an addend that is missing in one part of an axis, because that part has a branch of its own.

Concatenated tensors are often processed piece by piece, and the remainder of a blocked loop has its own code. In the
part that one piece or the remainder covers, one operator is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating
from ..change import Change, instead

_BLOCKS = (2, 4, 8, 16, 32, 64, 128)
_PRODUCTS, _SUMS = ("mul", "div"), ("add", "sub")
_PARTS = 8  # parts of an axis
_LEAST = 1e-12
Part = tuple[str, int, int]  # name, first place, place after the last


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    pieces: dict[int, list[Part]] = {}
    for call in calls:
        if not call.backward and call.index in among and call.name == "cat" and floating(call.out):
            for n, parts in _pieces(call):
                pieces.setdefault(n, []).extend(parts)
    for call in calls:
        if call.index not in among or call.backward or not call.owns or not floating(call.out):
            continue
        if call.name in (*_PRODUCTS, *_SUMS) and len(call.args) > 1 and floating(call.args[0]):
            for axis, n in enumerate(call.out.shape):
                for part in (*pieces.get(n, []), *_rests(n))[:_PARTS]:
                    yield from _left_out(call, axis, part, part in pieces.get(n, []))


def _pieces(call: Node) -> Iterator[tuple[int, list[Part]]]:
    axis = call.args[1] if len(call.args) > 1 else 0
    at, parts = 0, []
    for number, t in enumerate(call.args[0]):
        size = t.shape[axis]
        parts.append((f"in piece {number + 1} of {len(call.args[0])}, {at}..{at + size - 1},", at, at + size))
        at += size
    if 1 < len(parts) <= _PARTS:
        yield at, [p for p in parts if p[1] < p[2] and p[2] - p[1] < at]


def _rests(n: int) -> list[Part]:
    """The remainder of an axis after its whole blocks."""
    rests = {n - n % block: block for block in _BLOCKS if n > block and n % block}
    return [(f"after the last whole block of {b}, {at}..{n - 1},", at, n) for at, b in rests.items()]


def _left_out(call: Node, axis: int, part: Part, piece: bool) -> Iterator[Change]:
    where, lo, hi = part
    operands = [(0, 1)] if call.name in ("div", "sub") else [(0, 1), (1, 0)]
    for keep, other in operands:
        kept, gone = call.args[keep], call.args[other]
        if not isinstance(kept, Tensor) or isinstance(gone, Tensor) and not floating(gone):
            continue
        if isinstance(gone, Tensor) and gone.numel() == call.out.numel() and call.name in _SUMS and not piece:
            continue

        def there(*args: Any, keep: int = keep, **kwargs: Any) -> Tensor:
            out = call.func(*args, **kwargs)
            bare = args[keep].expand(out.shape)
            inside = torch.zeros(out.shape[axis], dtype=torch.bool, device=out.device)
            inside[lo:hi] = True
            return torch.where(inside.view([-1 if d == axis else 1 for d in range(out.dim())]), bare, out)

        name = call.operand(other) or f"an operand of {call.name}"
        product = call.name in _PRODUCTS
        text = f"{where} of axis {axis} {name} is left out of {call.expression}"
        params = {"axis": axis, "part": [lo, hi], **({"factor": name} if product else {"term": name})}
        cause = "wrong_factor" if product else "missing_term"
        yield Change(cause, text, call.index, instead(there), params, 0.5 - 0.06 * (not piece))
