"""Fits the unknown number of a change, and names the number."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from ..edits.golden_edit import EditedRun, NamedEdit
from ..facts.evidence import WhatIf
from ..facts.numbers import name
from .gauss_newton import fitting
from .search_context import SearchContext
from .witness import few

EXPLAINED = 0.999  # share of the squared error


def sought(search: SearchContext, change: NamedEdit) -> WhatIf | None:
    """The change with its best number; a factor is fitted by its logarithm."""
    if change.free is None:
        return None
    factor = change.free == 1.0

    def at(t: float) -> Tensor | None:
        run = EditedRun(change.edit.with_number(math.exp(t) if factor else t))
        value = (search.values_after(dict(run.changes()), search.tensor) or {}).get(search.tensor)
        return value if value is not None and value.shape == search.judge.got.shape else None

    begin = 0.0 if factor else change.free
    best = fitting(at, search.judge, begin, 3.0 if factor else math.inf)
    if best is None or best.share < EXPLAINED or best.at == begin:
        return None
    number = math.exp(best.at) if factor else best.at
    fitted = replace(change, edit=change.edit.with_number(number), free=None)
    confirmed = not few(search.judge) or search.explains_other_draws(fitted)
    return _number(search, change, number, best.share, best.exact) if confirmed else None


def _number(search: SearchContext, change: NamedEdit, number: float, share: float, exact: bool) -> WhatIf | None:
    """The meaning of the best number."""
    if change.free == 1.0 and not 1e-4 < number < 1e6:
        return None  # 0 or 1, a missing or an unchanged term: another change covers it
    label = name(number, 1e-3 * min(abs(number), abs(number - 1)), search.numbers) if change.free == 1.0 else None
    called = label.name if label is not None else ""
    cause, prior = change.cause, change.prior - 0.1
    if change.free == 1.0:
        near = abs(number - 1) < 2.0**-5 and not any(n in called for n in search.numbers)
        cause = "scale_bias" if near else cause
        prior -= 0.2 * near
        if cause == "repeated_term" and abs(number - round(number)) > 1e-3:
            cause = "wrong_factor"
    text = f"{change.text} {number:.6g}" + (f" = {called}" if called and called != f"{number:g}" else "")
    params = {**change.params, "value": number, "named": called}
    return WhatIf(cause, text, search.tensor, share, exact, params, prior=prior, also=change.also)
