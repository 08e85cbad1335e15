"""Finds the first stage to which a kernel, right on ordinary inputs, wrongly passes a NaN of an input."""

from __future__ import annotations

import math

import torch

from ...golden.golden_error import GoldenError
from ...judge.examination import Examination
from ...probes import slices as parts
from .isolate import named, order

_LEAKS = ("leak", "neighbour_read", "nonfinite_leak")  # kinds of findings
_MOST = 4  # slices to try, one run of the candidate for each


def first_nan_leak(examination: Examination) -> str:
    """The name of the first stage or result, in the golden's order, with a NaN that the golden lacks; "" if none.

    Puts NaN into up to four input slices: those that findings of `taint` name, or else the first ones.
    """
    leaks = [f.values for f in examination.findings if f.kind in _LEAKS]
    if not leaks:
        return ""
    slices = [s for s in parts.slices(examination) if not s.random]
    slices = [s for s in slices if {"input": s.name, "axis": s.axis, "index": s.index} in leaks] or slices
    planted = [s.filled(examination, math.nan) for s in slices[:_MOST]]
    first_places: dict[str, int] = {}
    for material in planted:
        run = examination.execute("runs", "NaN in an input", material=material, look=False)
        if run.error is not None:
            continue
        try:
            golden = examination.references(material, run, parts.own_decisions(examination, run))
            values = golden.values  # computed before order(), which reads the order of their computation
        except GoldenError:
            continue
        mine = named(run)
        for place, name in enumerate(order(golden, run)):
            got, wanted = mine.get(name, ("", None))[1], values.get(name)
            if got is None or wanted is None or got.shape != wanted.shape or name in examination.target.decisions:
                continue
            if got.is_floating_point() and bool((torch.isnan(got) & ~torch.isnan(wanted)).any()):
                first_places.setdefault(name, place)
                break
    return min(first_places, key=lambda name: first_places[name], default="")
