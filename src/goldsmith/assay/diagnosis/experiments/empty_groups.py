"""Tests whether an error disappears once every group has a member."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ...judge.examination import Examination

PROBE = "filled groups"
_TRIES = 4


def filled_groups(examination: Examination) -> str:
    """The empty groups, if the candidate raises with them and not once they are filled; otherwise "".

    Groups are the values of an integer input below a size of the case, or the ranges between neighbouring offsets.
    """
    tries = 0
    for name, indices in examination.material.inputs.items():
        if indices.is_floating_point() or indices.dtype == torch.bool or indices.numel() < 2 or int(indices.min()) < 0:
            continue
        for description, full in _filled_variants(indices, examination.material.sizes):
            if tries == _TRIES:
                return ""
            tries += 1
            run = examination.execute(PROBE, name, material=examination.material.with_inputs({name: full}), look=False)
            if run.error is None:
                return f"{name} {description}; with something in every group nothing is raised"
    return ""


def _filled_variants(indices: Tensor, sizes: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    flat = indices.flatten()
    steps = flat.diff()
    if indices.dim() == 1 and int(flat[0]) == 0 and int(flat[-1]) >= len(steps) and bool((steps >= 0).all()):
        empty = (steps == 0).nonzero().flatten().tolist()
        if empty:
            even = torch.linspace(0, int(flat[-1]), len(flat), device=flat.device, dtype=torch.float64).long()
            yield f"has nothing in group {', '.join(map(str, empty[:4]))}", even.to(indices.dtype)
            return
    known, ordered = set(flat.tolist()), bool((steps >= 0).all())
    for n in sorted({n for n in sizes.values() if isinstance(n, int) and int(flat.max()) < n}):
        left = [i for i in range(n) if i not in known]
        more = _with_numbers(flat, left) if left else None
        if more is not None:
            more = more.sort().values if ordered else more
            yield f"leaves out {', '.join(map(str, left[:4]))}", more.reshape(indices.shape)


def _with_numbers(flat: Tensor, left: list[int]) -> Tensor | None:
    """A copy in which each number of `left` replaces one occurrence of a number that occurs several times; None if
    impossible.
    """
    out, count = flat.clone(), torch.bincount(flat)
    places = range(len(flat) - 1, -1, -1)
    for number in left:
        at = next((p for p in places if int(out[p]) < len(count) and count[out[p]] > 1), None)
        if at is None:
            return None
        count[out[at]] -= 1
        out[at] = number
        if number < len(count):
            count[number] = 1
    return out
