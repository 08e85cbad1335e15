"""Causal sums that a kernel computes chunk by chunk: wrong state carried over from earlier chunks.

The golden computes them with a lower triangular matrix, as a product or a masked sum; a kernel carries a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating, replaced
from ..change import Change, with_arguments

_CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128)
_ALSO = ("truncated_reduction", "missing_term")


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.backward or call.name not in ("mm", "bmm", "sum") or not call.args:
        return
    x = call.args[0]
    if not floating(x) or x.dim() < 2 or x.shape[-1] != x.shape[-2] or x.shape[-1] < 3 or not bool(x.any()):
        return
    if call.name == "sum" and (len(call.args) < 2 or [d % x.dim() for d in call.args[1]] != [x.dim() - 1]):
        return
    lower, upper = not bool(x.triu(1).any()), not bool(x.tril(-1).any())
    if lower == upper:
        return
    n = x.shape[-1]
    place = torch.arange(n, device=x.device)
    for chunk in _CHUNKS:
        if chunk >= n:
            break
        apart = (place[:, None] // chunk - place // chunk).abs()
        for most, cause, how in (
            (0, "overwritten_accumulator", "nothing is carried over from previous chunks"),
            (1, "overwritten_accumulator", "only the previous chunk is carried over"),
        ):
            kept = apart <= most
            if bool((x * ~kept).any()):

                def within(args: tuple, kept: Tensor = kept) -> tuple[object, ...]:
                    return replaced(args, 0, args[0] * kept)

                text = f"in chunks of {chunk} of {call.expression} {how}"
                yield Change(cause, text, call.index, with_arguments(within), {"chunk": chunk}, 0.55, also=_ALSO)
