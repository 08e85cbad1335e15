"""Backward sums that a kernel takes in small blocks, per sequence, or in a loop.

One block replaces the others, the last is left out, or a block reads its weights untransposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...graph.node import Changed, Node
from ...graph.tensors import floating, replaced
from ..change import Change, with_arguments

BLOCKS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, 128)
_PRODUCTS = {"mm": (1, 0), "bmm": (2, 1), "mv": (1, 0)}
_MOST = 128  # operators in a group


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    alike: dict[tuple, list[Node]] = {}
    for call in calls:
        sums = call.name in _PRODUCTS or call.name == "sum" and _axis(call) is not None
        if call.backward and call.index in among and sums and all(map(floating, call.tensors)):
            alike.setdefault((call.name, call.line, *_makers(calls, call)), []).append(call)
    for members in alike.values():
        if len(members) <= _MOST:
            yield from _cut(members)
        if len(members) == 1 and members[0].name in ("mm", "bmm"):
            yield from _turned(members[0])


def _makers(calls: Sequence[Node], call: Node) -> Iterator[str]:
    for key in call.makers:
        maker = calls[key] if isinstance(key, int) and 0 <= key < len(calls) else None
        yield str(key) if maker is None else f"{maker.name} {maker.line} {maker.backward}"


def _axis(call: Node) -> int | None:
    dims = call.args[1] if len(call.args) > 1 else None
    return dims[0] % call.args[0].dim() if isinstance(dims, list | tuple) and len(dims) == 1 else None


def _contracted(call: Node) -> int:
    axis = _PRODUCTS[call.name][0] if call.name in _PRODUCTS else _axis(call)
    return 0 if axis is None else axis


def _cut(members: Sequence[Node]) -> Iterator[Change]:
    lengths = [c.args[0].shape[_contracted(c)] for c in members]
    often = f", in {len(members)} places" if len(members) > 1 else ""
    for block in BLOCKS:
        if block >= max(lengths):
            continue
        kinds = (
            ("overwritten_accumulator", f"of its blocks of {block} the last one alone is left",
             lambda n, b=block: ((n - 1) // b * b, n), ("truncated_reduction", "lost_update"), 0.0),
            ("truncated_reduction", f"of its blocks of {block} the first one alone is left",
             lambda n, b=block: (0, min(b, n)), ("overwritten_accumulator", "missing_term"), 0.01),
            ("truncated_reduction", f"the last of its blocks of {block} is left out",
             lambda n, b=block: (0, (n - 1) // b * b), ("off_by_one", "missing_term"), 0.01),
            ("truncated_reduction", f"the first of its blocks of {block} is left out",
             lambda n, b=block: (min(b, n), n), ("off_by_one", "missing_term"), 0.02),
        )  # fmt: skip
        for cause, how, part, also, rarer in kinds:
            group = tuple((c.index, _only(_contracted(c), *part(n))) for c, n in zip(members, lengths, strict=True))
            text = f"{members[0].expression}: {how}{often}"
            params = {"block": block, "axis": _contracted(members[0])}
            yield Change(cause, text, group[0][0], group[0][1], params, 0.5 - rarer,
                         group=group if len(group) > 1 else (), also=also)  # fmt: skip


def _only(axis: int, lo: int, hi: int) -> Changed:
    def part(args: tuple) -> tuple:
        out = torch.zeros_like(args[0])
        if hi > lo:
            out.narrow(axis, lo, hi - lo).copy_(args[0].narrow(axis, lo, hi - lo))
        return replaced(args, 0, out)

    return with_arguments(part)


def _turned(call: Node) -> Iterator[Change]:
    """Each diagonal block of a square operand is read transposed."""
    for i, x in enumerate(call.tensors[:2]):
        n = x.shape[-1]
        if x.shape[-2] != n or n < 3 or torch.equal(x, x.mT):
            continue
        for block in (b for b in BLOCKS if b < n):
            text = f"within blocks of {block} {call.expression} reads {call.operand(i) or 'an operand'} transposed"
            change = with_arguments(lambda args, i=i, b=block: replaced(args, i, _in_blocks(args[i], b)))
            yield Change("transposed", text, call.index, change, {"operand": i, "block": block}, 0.5)


def _in_blocks(x: Tensor, block: int) -> Tensor:
    out = x.clone()
    for at in range(0, x.shape[-1], block):
        part = (..., slice(at, at + block), slice(at, at + block))
        out[part] = x[part].mT
    return out
