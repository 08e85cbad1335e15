"""Examines slices that should have influence and have none: is a sum cut short, or is a wrong place read?

absent   the result equals the golden's with zeros in those slices: their contribution is missing altogether
summed   two slices move the same element of the golden; if none do, nothing is summed along that axis
beside   other inputs that are summed along an axis of the same length and are read throughout. A loop that is cut
         short reads less of all of them; if only one lacks a part, the kernel reads another part of it instead
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...golden.golden_error import GoldenError
from ...golden.golden_results import GoldenResults
from ...judge.examination import Examination
from ...probes.slices import far, own_decisions
from ..facts.evidence import Influence
from ..whatif.judge import Judge

_MOST = 6  # influences to examine


def examine_missing(
    examination: Examination,
    tensor: str,
    got: Tensor | None,
    influences: Mapping[str, Influence],
    throughout: Iterable[tuple[str, int, int]],
    *,
    spent: Callable[[], bool] = lambda: False,
) -> dict[str, Influence]:
    """The same influences, with `absent`, `summed` and `beside` filled in; runs the golden up to four times for each.

    throughout  (input, axis, length) of the axes whose slices all have the influence that they should have
    """
    out = dict(influences)
    known, summed = list(throughout), {}
    for key, i in list(out.items())[:_MOST]:
        if not i.missing or i.none or spent():
            continue
        others = [(name, axis) for name, axis, n in known if n == i.length and name != i.input][:_MOST]
        for name, axis in others:
            if (name, axis) not in summed and not spent():
                summed[name, axis] = _summed(
                    examination, tensor, Influence(name, axis, ((0, i.length - 1),), length=i.length)
                )
        summed_alike = tuple(f"{name}[axis {axis}]" for name, axis in others if summed.get((name, axis)))
        absent = _absent(examination, tensor, got, i)
        out[key] = replace(i, beside=summed_alike, absent=absent, summed=_summed(examination, tensor, i))
    return out


def _absent(examination: Examination, tensor: str, got: Tensor | None, i: Influence) -> bool | None:
    """True if zeros in the missing slices give the candidate's numbers; None if this cannot be tested."""
    bounded = examination.ref.bounded.get(tensor)
    if bounded is None or got is None or got.shape != bounded.value.shape or not got.is_floating_point():
        return None
    copy = examination.material.inputs[i.input].clone(memory_format=torch.contiguous_format)
    for lo, hi in i.missing:
        copy.narrow(i.axis, lo, hi - lo + 1).zero_()
    golden = _golden(examination, i.input, copy)
    if golden is None:
        return None
    return Judge(got.detach(), bounded.value, bounded.bound).explained(golden.plain.get(tensor))[1]


def _summed(examination: Examination, tensor: str, i: Influence) -> bool | None:
    """True if another missing slice moves an element of the golden that the first one also moves; None if unknown."""
    before = examination.ref.plain.get(tensor)
    (lo, hi), last = i.missing[0], i.length - 1
    # a single slice is compared with one that is read
    others = dict.fromkeys((hi, lo + 1)) if lo < hi else [0 if lo else last]
    if before is None or not i.length:
        return None
    moved = [m for at in (lo, *others) if (m := _moved(examination, tensor, before, i, at)) is not None]
    if len(moved) < 2:
        return None
    return any(bool((moved[0] & other).any()) for other in moved[1:])


def _moved(examination: Examination, tensor: str, before: Tensor, i: Influence, at: int) -> Tensor | None:
    """Mask of the golden's elements that move when one slice holds a large number."""
    copy = examination.material.inputs[i.input].clone(memory_format=torch.contiguous_format)
    copy.select(i.axis, at).fill_(far(copy))
    golden = _golden(examination, i.input, copy)
    after = None if golden is None else golden.plain.get(tensor)
    return None if after is None or after.shape != before.shape else after != before


def _golden(examination: Examination, name: str, value: Tensor) -> GoldenResults | None:
    try:
        golden = examination.references(
            examination.material.with_inputs({name: value}),
            examination.first,
            own_decisions(examination, examination.first),
        )
        _ = golden.plain
    except GoldenError:
        return None
    return golden
