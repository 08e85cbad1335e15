"""Changes at the borders between chunks of a loop."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...graph.node import Node
from ..call_groups import together
from ..change import Change, with_result

_MOST = 1024  # steps
_OF_A_STEP = 8  # operators of one name and line
_CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256)


def changes(calls: Sequence[Node], by_call: Mapping[int, Sequence[Change]], wrong: Tensor) -> Iterator[Change]:
    """The earliest wrong element bounds the first border: no element before it is wrong.

    In gradients it is the other way round: the last chunk is right.
    """
    lines: dict[tuple[str, str, bool], list[Node]] = {}
    for call in calls:
        if call.line and call.index in by_call:
            lines.setdefault((call.name, call.line, call.backward), []).append(call)
    for backward, n, chunk in _chunks(wrong):
        for (_, _, back), members in lines.items():
            each = -(-len(members) // n)
            if back != backward or len(members) < each * n - 1 or not 1 <= each <= _OF_A_STEP:
                continue  # whatever precedes the first step has no gradient, so its operator is missing
            for i in range(each):
                steps = members[i::each]
                at = [n - 1 - t if backward else t for t in range(chunk, n, chunk)]
                changed = [steps[j] for j in at if j < len(steps)]
                where = f"at every {chunk}th of {n} steps" if 2 * chunk < n else f"at step {chunk} of {n}"
                for change in together(changed, by_call) if changed else ():
                    text = re.sub(r", in \d+ places$", "", change.text) + f", {where}, where a chunk begins"
                    yield replace(change, text=text, at=changed[0].index, prior=change.prior - 0.05)
                if changed and backward:
                    text = f"nothing of {changed[0].expression} is passed on, {where}, where a chunk begins"
                    group = tuple((c.index, with_result(torch.zeros_like)) for c in changed)
                    yield Change("missing_term", text, changed[0].index, group[0][1], {}, 0.5, group=group)


def _chunks(wrong: Tensor) -> Iterator[tuple[bool, int, int]]:
    """(whether the last chunk is the right one, number of steps, steps in a chunk)"""
    for axis in range(wrong.dim()):
        n = wrong.shape[axis]
        at = wrong.movedim(axis, 0).reshape(n, -1).any(-1).nonzero().flatten()
        if not 3 <= n <= _MOST or not len(at):
            continue
        first, last = int(at[0]), int(at[-1])
        if first > 1:
            yield False, n, first
        for chunk in _CHUNKS:
            if last < n - 1 and chunk < n and (n - 1) // chunk * chunk == last + 1:
                yield True, n, chunk
