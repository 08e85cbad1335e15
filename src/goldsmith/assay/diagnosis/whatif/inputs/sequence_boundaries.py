"""State that leaks across a border: between sequences in the forward, or missing between blocks in the backward.

Both are assembled from several runs of the golden: all sequences as one, or the output gradients of one block at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ...graph.tensors import floating
from ..change import Change
from ..loops.gradient_carries import CHUNKS
from .composed_slices import GoldenRun

_LEAST, _PAIRS = 2, 6
_BLOCKS_AT_MOST = 16
Values = Mapping[str, Tensor]


def changes(leaves: Values, tensor: str) -> Iterator[Change]:
    inputs = {n: t for n, t in leaves.items() if not n.startswith("grad_") and t.dim() > 1 and t.numel()}
    if not tensor.endswith(".grad"):
        for batch, time, shape in _axes(inputs):
            yield _as_one(inputs, batch, time, shape)
    else:
        sent = {n: t for n, t in leaves.items() if n.startswith("grad_") and t.numel()}
        whose = leaves.get(tensor.removesuffix(".grad"))
        if whose is not None and sent and whose.dim():
            yield from _no_further(whose, sent, tensor)


def _axes(inputs: Values) -> list[tuple[int, int, tuple[int, int]]]:
    """(axis of sequences, axis of steps, their lengths)"""
    axes: dict[tuple[int, int, tuple[int, int]], None] = {}
    for t in inputs.values():
        dims = range(min(t.dim(), 3)) if floating(t) else ()
        for batch in dims:
            for time in dims:
                if batch != time and t.shape[batch] >= _LEAST and t.shape[time] >= _LEAST:
                    axes.setdefault((batch, time, (t.shape[batch], t.shape[time])))
    return list(axes)[:_PAIRS]


def _as_one(inputs: Values, batch: int, time: int, shape: tuple[int, int]) -> Change:
    def fits(t: Tensor, lengths: tuple[int, int]) -> bool:
        return t.dim() > max(batch, time) and (t.shape[batch], t.shape[time]) == lengths

    def composed(leaves: Values, run: GoldenRun) -> Values:
        joined = {
            n: torch.cat(leaves[n].split(1, batch), time).contiguous() for n, t in inputs.items() if fits(t, shape)
        }
        done = run(joined)
        whole = (1, shape[0] * shape[1])
        return {k: torch.cat(v.split(shape[1], time), batch) for k, v in done.items() if fits(v, whole)}

    text = f"along axis {batch} each sequence starts from the final state of the previous one: the state is not reset"
    return Change("stale_state", text, -1, None, {"axis": batch}, 0.5, composed=composed,
                  also=("uninitialised_accumulator", "wrong_mask"))  # fmt: skip


def _no_further(whose: Tensor, sent: Values, tensor: str) -> Iterator[Change]:
    """A block passes on only its own gradient: the gradient that it received is lost."""
    for axis, n in enumerate(whose.shape):
        along = tuple(name for name, t in sent.items() if t.dim() > axis and t.shape[axis] == n)
        blocks = [b for b in CHUNKS if b < n and 2 < -(-n // b) <= _BLOCKS_AT_MOST] if along else []
        for block in blocks:
            text = f"in the backward each block of {block} of axis {axis} drops what later blocks carry to it"
            params = {"axis": axis, "block": block}
            yield Change("overwritten_accumulator", text, -1, None, params, 0.5,
                         composed=_handed_on(tensor, tuple(sent), along, axis, block),
                         also=("truncated_reduction", "missing_term"))  # fmt: skip


def _handed_on(
    tensor: str, sent: tuple[str, ...], along: tuple[str, ...], axis: int, block: int
) -> Callable[[Values, GoldenRun], Values]:
    def composed(leaves: Values, run: GoldenRun) -> Values:
        n = leaves[along[0]].shape[axis]
        total = torch.zeros_like(leaves[tensor.removesuffix(".grad")])
        for at in range(0, n, block):
            mine = {m: torch.zeros_like(leaves[m]) for m in sent}
            for m in sent:
                if m in along:
                    mine[m] = _only(leaves[m], axis, at, at + block)
                elif at + block >= n:  # of the remainder at the end
                    mine[m] = leaves[m]
            last = at + block >= n
            total += _only(run(mine)[tensor], axis, max(at - block, 0), at + block)
            if last and len(along) < len(sent):  # the gradient of the final state reaches the last block
                ends = {m: leaves[m] if m not in along else torch.zeros_like(leaves[m]) for m in sent}
                total -= _only(run(ends)[tensor], axis, max(at - block, 0), at)
        return {tensor: total}

    return composed


def _only(t: Tensor, axis: int, lo: int, hi: int) -> Tensor:
    out = torch.zeros_like(t)
    size = min(hi, t.shape[axis]) - lo
    out.narrow(axis, lo, size).copy_(t.narrow(axis, lo, size))
    return out
