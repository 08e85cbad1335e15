"""Rows that no part covers, so that zeros arrive for them: the rest after equal parts, indices that are too large."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...edits.primitives.repartitions import neutral
from ...edits.primitives.spans import Span
from ...edits.primitives.tensors import restrict
from ...edits.reductions import axes_of
from ...graph.node import Node
from ...graph.tensors import floating, replaced, whole
from ..change import Change, with_arguments, with_result

_LOOKUPS = frozenset("index index_select embedding gather".split())
_SUMS = frozenset("sum mean amax amin logsumexp".split())
_PARTS = (2, 3, 4, 8)
_NARROW = ((8, torch.int8), (16, torch.int16), (32, torch.int32))


def changes(calls: Sequence[Node], among: set[int], numbers: Mapping[str, object]) -> Iterator[Change]:
    """One of the numbers may be the number of parts."""
    case_counts = {n: k for k, n in numbers.items() if isinstance(n, int) and not isinstance(n, bool) and 1 < n <= 64}
    parts = {**{n: "" for n in _PARTS}, **case_counts}
    for call in calls:
        if call.index not in among or not call.args or not floating(call.args[0]) or not floating(call.out):
            continue
        if call.name in _LOOKUPS:
            yield from _of_a_lookup(call, parts)
        if call.name in _SUMS and len(axes_of(call)) == 1:
            yield from _of_a_sum(call, axes_of(call)[0], parts)


def _rests(n: int, parts: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    for count, name in parts.items():
        if count < n and n % count:
            of = f"{name}, {count}" if name else f"{count}"
            yield n - n % count, f"the remainder of {n} after {of} equal parts of {n // count} is in none of them"


def _looked_up(call: Node) -> tuple[Tensor, int, int] | None:
    """(the index, number of rows to choose from, axes of the result after those of the index)"""
    x = call.args[0]
    if call.name == "index":
        some = [(d, i) for d, i in enumerate(call.args[1]) if i is not None]
        if len(some) != 1 or some[0][0] or not whole(some[0][1]):
            return None
        return some[0][1], x.shape[0], x.dim() - 1
    index = call.args[1] if call.name == "embedding" else call.args[2]
    axis = 0 if call.name == "embedding" else call.args[1] % max(x.dim(), 1)
    if not whole(index) or call.name == "index_select" and axis:
        return None
    return index, x.shape[axis], 0 if call.name == "gather" else x.dim() - 1


def _of_a_lookup(call: Node, parts: Mapping[int, str]) -> Iterator[Change]:
    lookup = _looked_up(call)
    if lookup is None or not lookup[0].numel():
        return
    index, n, behind = lookup
    most = int(index.max())

    def without(lost: Tensor) -> Any:
        hidden = lost.reshape(*lost.shape, *[1] * behind)
        return with_result(lambda out: out.masked_fill(hidden, 0.0))

    for limit, why in _rests(n, parts):
        if most >= limit:
            text = f"{call.expression} reads nothing from index {limit} on: {why}"
            change = without(index >= limit)
            yield Change("missing_partition", text, call.index, change, {"from": limit}, 0.5,
                         also=("off_by_one", "wrong_mask"))  # fmt: skip
    for bits, dtype in _NARROW:
        if most > torch.iinfo(dtype).max:
            text = f"indices of {call.expression} have {bits} bits with a sign: those that become negative read nothing"
            change = without(index.to(dtype) < 0)
            yield Change("index_overflow", text, call.index, change, {"bits": bits}, 0.55,
                         also=("dtype_width", "invalid_index"))  # fmt: skip


def _of_a_sum(call: Node, axis: int, parts: Mapping[int, str]) -> Iterator[Change]:
    n, fill = call.args[0].shape[axis], neutral(call.name)
    for limit, why in _rests(n, parts):
        text = f"{call.expression} ends at {limit}: {why}"
        span = Span("equal parts", next(c for c in parts if n - n % c == limit))
        cut = with_arguments(lambda args, s=span: replaced(args, 0, restrict(args[0], axis=axis, span=s, fill=fill)))
        yield Change("missing_partition", text, call.index, cut, {"missing": [limit, n], "axis": axis}, 0.5,
                     also=("truncated_reduction", "off_by_one"))  # fmt: skip
