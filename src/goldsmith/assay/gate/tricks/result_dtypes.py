"""Results in a dtype that hides what a kernel lost before it stored them, or that a caller cannot use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....core.tracing import listening
from ...bounds.bounded import unit_roundoff
from ...checks import label_of
from ...declare.binding import inputs_and_scalars
from ...declare.case import Case
from ...declare.returned_values import names_of
from ...declare.target import Target
from ...execute.tracer import Tracer
from ...report.check_report import Report
from ..isolation.candidate_process import CandidateProcess

_ENOUGH = 4  # bytes of an integer: nothing is counted beyond 32 bits


def evidence(
    target: Target, cases: Sequence[Case], report: Report, process: CandidateProcess, device: str | torch.device,
    seed: int,
) -> str:  # fmt: skip
    """A sentence about a result or stage with such a dtype, or "". The report has no rows of decisions.

    A floating-point one may be as narrow as the reference's or any floating-point input. The reference runs for the
    first case in each dtype, and for another case only where a result has another dtype there.
    """
    dtypes: dict[str, set[tuple[str, torch.dtype]]] = {}
    for row in report.rows:
        stored = getattr(torch, row.dtype, None)
        if row.run == "values" and isinstance(stored, torch.dtype):
            dtypes.setdefault(row.case, set()).add((row.tensor, stored))
    known: dict[torch.dtype, set[tuple[str, torch.dtype]]] = {}
    for case in cases:
        decided = {(name, stored) for name in target.decisions for stored in process.dtypes.get((case.name, name), ())}
        for dtype in case.own_dtypes[:1] or target.dtypes:
            stores = dtypes.get(label_of(case, dtype, target, None), set()) | decided
            legal = known.setdefault(dtype, set())
            if stores <= legal:
                continue
            wanted = _of_the_reference(target, case, dtype, device, seed)
            for name, stored in sorted(stores, key=str):
                text = _fault(stored, wanted[name]) if name in wanted else ""
                if text:
                    return f"{name} is {_word(stored)}{text}"
            legal |= stores
    return ""


def _fault(stored: torch.dtype, allowed: Sequence[torch.dtype]) -> str:
    """What is wrong with a dtype beside those allowed, of which the reference's is the first."""
    wanted = allowed[0]
    if stored.is_floating_point and wanted.is_floating_point:
        narrow = unit_roundoff(stored) > max(map(unit_roundoff, allowed))
        return ", which is narrower than every input and than the reference's result" if narrow else ""
    alike = _kind(stored) == _kind(wanted) and stored.itemsize >= min(_ENOUGH, wanted.itemsize)
    return "" if alike else f" where the reference's is {_word(wanted)}"


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point or dtype.is_complex:
        return "floating"
    return "bool" if dtype == torch.bool else "integer"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_the_reference(
    target: Target, case: Case, dtype: torch.dtype, device: str | torch.device, seed: int
) -> Mapping[str, list[torch.dtype]]:
    """Result or stage -> its dtype, and those of all floating-point inputs; {} where the reference does not run so."""
    golden = getattr(target.golden, "plain", target.golden)
    supply = case.build(dtype, device, seed)
    inputs, _ = inputs_and_scalars(supply)
    floating = {n: t.dtype for n, t in inputs.items() if t.is_floating_point()}
    tracer = Tracer(live=True)
    try:
        with torch.no_grad(), listening(tracer):
            result = replace(target, golden=golden, runner=None).bound("golden", supply)(supply)
    except (RuntimeError, TypeError, ValueError):
        return {}
    pairs = names_of(result, target.outputs, "golden", unavailable=tuple(n for n in supply if n.startswith("grad_")))
    tensors = {**tracer.records, **{n: t for n, t in pairs if isinstance(t, Tensor)}}
    dtypes = {n: [t.dtype, *floating.values()] for n, t in tensors.items()}
    dtypes |= {f"saved.{n}": dtypes[n] for n in target.saved if n in dtypes}
    grads = {f"{n}.grad": d for n, d in (dtypes | {n: [d] for n, d in floating.items()}).items()}
    return dtypes | grads
