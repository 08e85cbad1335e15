"""Masks along a diagonal: shifted if there are more columns than rows, or applied per block.

If the queries are the last tokens, the diagonal is offset by the difference in length; a kernel that counts queries
from the first token misses this offset. A kernel that masks only blocks on the diagonal must skip those beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import replaced
from ..change import Change, instead, with_arguments, with_result

_BLOCKS = (2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128)
_COMPARES = frozenset("lt le gt ge".split())


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if not isinstance(call.out, Tensor) or call.out.dim() < 2 or not call.out.numel():
        return
    rows, columns = call.out.shape[-2:]
    if call.name in ("tril", "triu") and rows != columns:
        yield from _offsets(call, columns - rows)
    if call.name in _COMPARES and rows != columns and min(rows, columns) > 1:
        yield from _slid(call, columns - rows)
    if call.name in ("masked_fill", "where") and call.out.is_floating_point():
        yield from _in_blocks(call, 0 if call.name == "where" else 1)


def _offsets(call: Node, apart: int) -> Iterator[Change]:
    diagonal = call.args[1] if len(call.args) > 1 else call.kwargs.get("diagonal", 0)
    which = torch.tril if call.name == "tril" else torch.triu
    for other in (diagonal - apart, diagonal + apart):
        text = f"the diagonal of {call.name} is {other} instead of {diagonal}: {_explanation(apart)}"
        change = instead(lambda x, *a, at=other, **k: which(x, at))
        yield Change("mask_shift", text, call.index, change, {"diagonal": other}, 0.7, also=("wrong_mask",))


def _explanation(apart: int) -> str:
    return f"the numbers of rows and columns differ by {abs(apart)}, and positions are counted from the other end"


def _slid(call: Node, apart: int) -> Iterator[Change]:
    """A comparison of positions, shifted; at the end the border values repeat."""
    for axis in (call.out.dim() - 1, call.out.dim() - 2):
        n = call.out.shape[axis]
        for step in (apart, -apart):

            def other(m: Tensor, step: int = step, axis: int = axis, n: int = n) -> Tensor:
                return m.index_select(axis, (torch.arange(n, device=m.device) - step).clamp(0, n - 1))

            text = f"the mask {call.expression} is shifted by {step} along axis {axis}: {_explanation(apart)}"
            params = {"axis": axis, "step": step}
            yield Change("mask_shift", text, call.index, with_result(other), params, 0.5, also=("wrong_mask",))


def _in_blocks(call: Node, at: int) -> Iterator[Change]:
    """Only the blocks that the diagonal crosses are masked, or all blocks except those."""
    mask = call.args[at]
    if not isinstance(mask, Tensor) or mask.dim() < 2 or min(mask.shape[-2:]) < 2:
        return
    rows, columns = mask.shape[-2:]
    i, j = torch.arange(rows, device=mask.device)[:, None], torch.arange(columns, device=mask.device)
    seen = torch.zeros_like(mask) if call.name == "masked_fill" else torch.ones_like(mask)
    for block in (b for b in _BLOCKS if b < max(rows, columns)):
        crossed = i // block == j // block
        for text, kept in (
            (f"only the blocks of {block} on the diagonal are masked, those beyond it are not", crossed),
            (f"the blocks of {block} on the diagonal are not masked", ~crossed),
        ):
            new = torch.where(kept, mask, seen)
            if not torch.equal(new, mask):
                change = with_arguments(lambda args, m=new: replaced(args, at, m.expand_as(args[at])))
                params = {"block": block}
                yield Change("wrong_mask", f"of {call.expression} {text}", call.index, change, params, 0.6)
