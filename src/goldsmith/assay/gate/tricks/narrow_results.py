"""Results in a narrower dtype than the reference's own, which covers what the kernel lost before it stored them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...bounds.bounded import unit_roundoff
from ...checks import label_of
from ...declare.binding import inputs_and_scalars
from ...declare.case import Case
from ...declare.returned_values import names_of
from ...declare.target import Target
from ...report.check_report import Report


def evidence(target: Target, report: Report, device: str | torch.device, seed: int) -> str:
    """A sentence about a result that is narrower than the reference's and than every floating-point input, or "".

    A kernel whose inputs have several dtypes may return its result in any of them.
    """
    case = target.cases[0]
    for dtype in case.own_dtypes[:1] or target.dtypes:
        label = label_of(case, dtype, target, None)
        rows = [r for r in report.rows if r.case == label and r.run == "values" and r.kind == "output"]
        wide = _of_the_reference(target, case, dtype, device, seed) if rows else {}
        for row in rows:
            stored = getattr(torch, row.dtype)
            if row.tensor in wide and unit_roundoff(stored) > wide[row.tensor]:
                return (
                    f"{row.tensor} is {row.dtype}, which is narrower than every input and than the reference's result"
                )
    return ""


def _of_the_reference(
    target: Target, case: Case, dtype: torch.dtype, device: str | torch.device, seed: int
) -> Mapping[str, float]:
    """Result -> the largest unit roundoff that it may have; {} where the reference does not run in this dtype."""
    golden = getattr(target.golden, "plain", target.golden)
    supply = case.build(dtype, device, seed)
    inputs, _ = inputs_and_scalars(supply)
    units = [unit_roundoff(t.dtype) for t in inputs.values() if t.is_floating_point()]
    try:
        with torch.no_grad():
            result = replace(target, golden=golden, runner=None).bound("golden", supply)(supply)
    except (RuntimeError, TypeError, ValueError):
        return {}
    pairs = names_of(result, target.outputs, "golden", unavailable=tuple(n for n in supply if n.startswith("grad_")))
    floating = {n: t for n, t in pairs if isinstance(t, Tensor) and t.is_floating_point()}
    return {n: max([unit_roundoff(t.dtype), *units]) for n, t in floating.items()}
