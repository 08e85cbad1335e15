"""Where NaN of an input first arrives that should not: of a kernel whose plain run is right, the stage that leaks."""

from __future__ import annotations

import math

import torch

from ..golden.golden_error import GoldenError
from ..judge.examination import Examination
from ..probes import scaling
from ..probes import slices as parts
from .isolate import named, order

_LEAKS = ("reaches ", "is not finite where the golden is")
_MOST = 4  # planted slices that are tried


def leaking(examination: Examination) -> str:
    """The first stage or result, in the golden's order, that holds NaN where the golden has none; "" without any.

    The NaN is planted where a finding of `taint` says that it leaks from, else into the first slices of the inputs.
    """
    probes = (parts.NAME, scaling.NAME)
    said = [f.text for f in examination.findings if f.probe in probes and any(words in f.text for words in _LEAKS)]
    if not said:
        return ""
    slices = [s for s in parts.slices(examination) if not s.random]
    slices = [s for s in slices if any(f" {s.text} " in text for text in said)] or slices
    planted = [s.filled(examination, math.nan) for s in slices[:_MOST]]
    found: dict[str, int] = {}
    for material in planted:
        done = examination.execute("runs", "NaN in an input", material=material, look=False)
        if done.error is not None:
            continue
        try:
            golden = examination.references(material, done, parts.own_decisions(examination, done))
            values = golden.values  # known before the order is: it is that in which they were made
        except GoldenError:
            continue
        mine = named(done)
        for place, name in enumerate(order(golden, done)):
            got, wanted = mine.get(name, ("", None))[1], values.get(name)
            if got is None or wanted is None or got.shape != wanted.shape or name in examination.target.decisions:
                continue
            if got.is_floating_point() and bool((torch.isnan(got) & ~torch.isnan(wanted)).any()):
                found.setdefault(name, place)
                break
    return min(found, key=lambda name: found[name], default="")
