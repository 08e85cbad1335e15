"""A closer look at slices that have no influence and should: three questions that tell a cut sum from a wrong place.

absent   is the result the golden's with zeros in those slices? Then what they stand for is not there at all
summed   do two slices move one and the same element of the golden? If none do, nothing is summed along that axis
beside   which other inputs are summed along an axis as long, and are read throughout? A loop that is cut short reads
         less of all of them; where one alone lacks a part, another part of it is read in its place
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..golden.golden_error import GoldenError
from ..golden.golden_results import GoldenResults
from ..judge.examination import Examination
from ..probes.slices import far, own_decisions
from .evidence import Influence
from .whatif.judge import Judge

_MOST = 6  # influences that are looked at


def closer(
    examination: Examination,
    tensor: str,
    got: Tensor | None,
    found: Mapping[str, Influence],
    throughout: Iterable[tuple[str, int, int]],
    *,
    spent: Callable[[], bool] = lambda: False,
) -> dict[str, Influence]:
    """The same influences, with what was found out about those that miss something; up to four runs of the golden each.

    throughout  (input, axis, length) of what has the influence that it should have
    """
    out = dict(found)
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
        beside = tuple(f"{name}[axis {axis}]" for name, axis in others if summed.get((name, axis)))
        absent = _absent(examination, tensor, got, i)
        out[key] = replace(i, beside=beside, absent=absent, summed=_summed(examination, tensor, i))
    return out


def _absent(examination: Examination, tensor: str, got: Tensor | None, i: Influence) -> bool | None:
    """Whether zeros in the missing slices make the candidate's numbers; None where that cannot be asked."""
    bounded = examination.ref.bounded.get(tensor)
    if bounded is None or got is None or got.shape != bounded.value.shape or not got.is_floating_point():
        return None
    copy = examination.material.inputs[i.input].clone(memory_format=torch.contiguous_format)
    for lo, hi in i.missing:
        copy.narrow(i.axis, lo, hi - lo + 1).zero_()
    made = _golden(examination, i.input, copy)
    if made is None:
        return None
    return Judge(got.detach(), bounded.value, bounded.bound).explained(made.plain.get(tensor))[1]


def _summed(examination: Examination, tensor: str, i: Influence) -> bool | None:
    """Whether what the first slice moves in the golden is moved by another of those that are missing as well."""
    before = examination.ref.plain.get(tensor)
    (lo, hi), last = i.missing[0], i.length - 1
    others = dict.fromkeys((hi, lo + 1)) if lo < hi else [0 if lo else last]  # of one slice, one that is read
    if before is None or not i.length:
        return None
    moved = [m for at in (lo, *others) if (m := _moved(examination, tensor, before, i, at)) is not None]
    if len(moved) < 2:
        return None
    return any(bool((moved[0] & other).any()) for other in moved[1:])


def _moved(examination: Examination, tensor: str, before: Tensor, i: Influence, at: int) -> Tensor | None:
    """The elements of the golden that a large number in one slice moves."""
    copy = examination.material.inputs[i.input].clone(memory_format=torch.contiguous_format)
    copy.select(i.axis, at).fill_(far(copy))
    made = _golden(examination, i.input, copy)
    after = None if made is None else made.plain.get(tensor)
    return None if after is None or after.shape != before.shape else after != before


def _golden(examination: Examination, name: str, value: Tensor) -> GoldenResults | None:
    try:
        made = examination.references(
            examination.material.with_inputs({name: value}),
            examination.first,
            own_decisions(examination, examination.first),
        )
        _ = made.plain
    except GoldenError:
        return None
    return made
