"""The same values in other layouts: transposed, stepped, misaligned, and expanded with stride 0.

For an autograd.Function with several outputs, further runs send a gradient to one output alone, each of the first few.

An exception of the candidate counts as a refusal. A target with layouts="contiguous" may refuse inputs, but never
output gradients, since autograd sends such layouts itself (`y.sum().backward()` sends stride 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..execute.memory import LAYOUTS, strides_for
from ..execute.records import CandidateRun, RunSettings
from ..golden.golden_results import GoldenResults
from ..judge.agreement import same_bits
from ..judge.examination import Examination
from ..report.results import CERTAIN
from . import decisions, reach, values

NAME = "layouts"
REFUSALS = (ValueError, TypeError, RuntimeError)
_ALONE = 8  # outputs at most that get a gradient alone


def run(examination: Examination) -> None:
    inputs = tuple(examination.material.inputs)
    sent = tuple(f"grad_{n}" for n in examination.first.cotangents)
    contiguous_only = examination.target.layouts == "contiguous"
    for layout in LAYOUTS:
        names = [n for n in (*inputs, *sent) if _differs(examination, n, layout)]
        if contiguous_only:
            refused = [n for n in names if n in inputs and not _dense(examination, n, layout)]
            names = [n for n in names if n not in refused]
            if refused:
                _check_refusal(examination, layout, refused)
        if names:
            _try_layout(examination, layout, names)
    _try_expanded(examination, contiguous_only)
    if examination.first.own_function and len(examination.first.cotangents) > 1:
        for name in list(examination.first.cotangents)[:_ALONE]:
            _try_alone(examination, name)


def _try_alone(examination: Examination, name: str) -> None:
    """Send a gradient to one of several outputs alone, as `loss.backward()` of (loss, z) does.

    For the other outputs autograd passes zeros to a Function, or None after `ctx.set_materialize_grads(False)`.
    """
    label = f"grad_{name} alone"
    run = examination.execute(NAME, label, RunSettings(only_output=name))
    if not examination.raised(NAME, f"a gradient for {name} alone, none for the other outputs", run):
        settled = decisions.settle(examination, run, examination.references(examination.material, run))
        values.judge(examination, run, settled, NAME, label, noise=False, repeat=None, skip=frozenset(examination.bad))


def _value(examination: Examination, name: str) -> Tensor:
    value = examination.material.inputs.get(name)
    return examination.first.cotangents[name.removeprefix("grad_")] if value is None else value


def _differs(examination: Examination, name: str, layout: str) -> bool:
    """Whether the layout changes the strides of this tensor."""
    value = _value(examination, name)
    return value.numel() > 0 and strides_for(value, layout) != strides_for(value, None)


def _dense(examination: Examination, name: str, layout: str) -> bool:
    """Whether the tensor is still contiguous in that layout, as a misaligned vector is."""
    value = _value(examination, name)
    strides, _ = strides_for(value, layout)
    return torch.empty_strided(value.shape, strides, device="meta").is_contiguous()


def _try_layout(examination: Examination, layout: str, names: list[str]) -> None:
    """Try all tensors in this layout at once; if that fails, one at a time, to name the culprit."""
    if _agrees(examination, layout, names, report=len(names) == 1):
        return
    if len(names) > 1 and all([_agrees(examination, layout, [n], report=True) for n in names]):
        _agrees(examination, layout, names, report=True)


def _agrees(examination: Examination, layout: str, names: list[str], *, report: bool) -> bool:
    label = f"layout:{layout}({', '.join(names)})"
    how = RunSettings(layouts=dict.fromkeys(names, layout))
    run = examination.execute(NAME, label, how)
    if run.error is not None:
        if report:
            examination.raised(NAME, label, run)
        return False
    first = {n: t for n, _, t in examination.first.results()}
    changed = [t for n, _, t in run.results() if not same_bits(first.get(n), t)]
    if not changed:
        return True
    before = list(examination.findings), dict(examination.maps)
    reference = examination.ref
    if not examination.same_decisions(run) or any(t is not None and not t.is_floating_point() for t in changed):
        reference = decisions.settle(examination, run, examination.references(examination.material, run))
    noise, skip = "ensemble" in examination.selected, frozenset(examination.bad)
    failed = values.judge(examination, run, reference, NAME, label, noise=noise, repeat=how, skip=skip)
    if not report:
        examination.findings, examination.maps = before
    return not failed


def _check_refusal(examination: Examination, layout: str, names: list[str]) -> None:
    """With layouts="contiguous" the candidate must either raise an exception or return the right result."""
    label = f"layout:{layout}({', '.join(names)})"
    run = examination.execute(NAME, label, RunSettings(layouts=dict.fromkeys(names, layout)))
    if isinstance(run.error, REFUSALS):
        text = f"{layout} inputs are refused, as declared: {_first_line(run.error)}"
        examination.note("refused_layout", ", ".join(names), text)
    elif run.error is not None:
        examination.raised(NAME, label, run)
    else:
        values.judge(
            examination, run, examination.ref, NAME, label, noise=False, repeat=None, skip=frozenset(examination.bad)
        )


def _first_line(error: BaseException) -> str:
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:200]


def _try_expanded(examination: Examination, contiguous_only: bool) -> None:
    """Send one number to every element, as `y.sum().backward()` does, and expand the first row of every input.

    Both at once; if that fails, each alone, to name the culprit. If all is right, also send one number per row, as
    `y.sum(-1)` does: a kernel that reads any stride of 0 as a single number passes the first run.
    """
    sent = {n: _one_number(c) for n, c in examination.first.cotangents.items() if c.numel() > 1}
    inputs = {} if contiguous_only else _repeated_rows(examination)
    if not sent and not inputs:
        return
    if _expanded_agrees(examination, sent, inputs, report=not (sent and inputs)):
        rows = {n: c[..., :1].expand(c.shape) for n, c in examination.first.cotangents.items() if _has_rows(c)}
        if rows:
            _expanded_agrees(examination, rows, {}, report=True, of=" along its last axis")
        for number in (1.0, 0.0):  # what y.sum() and an unused output send; a kernel may treat them as special
            exact = {n: torch.full_like(c.flatten()[:1], number) for n, c in examination.first.cotangents.items()}
            alike = {n: t.reshape([1] * sent[n].dim()).expand(sent[n].shape) for n, t in exact.items() if n in sent}
            if alike:
                _expanded_agrees(examination, alike, {}, report=True, of=f" = {number:g}")
        return
    if (
        sent
        and inputs
        and all([_expanded_agrees(examination, s, i, report=True) for s, i in ((sent, {}), ({}, inputs))])
    ):
        _expanded_agrees(examination, sent, inputs, report=True)


def _has_rows(cotangent: Tensor) -> bool:
    return cotangent.dim() > 1 and cotangent.shape[-1] > 1 and cotangent.numel() > cotangent.shape[-1]


def _one_number(cotangent: Tensor) -> Tensor:
    return cotangent.flatten()[:1].reshape([1] * cotangent.dim()).expand(cotangent.shape)


def _repeated_rows(examination: Examination) -> dict[str, Tensor]:
    """Floating inputs expanded with stride 0; not those that the target mutates, since elements share memory."""
    inputs = examination.material.inputs.items()
    return {
        n: _repeat_first(t)
        for n, t in inputs
        if t.is_floating_point() and t.numel() > 1 and n not in examination.target.mutates
    }


def _expanded_agrees(
    examination: Examination, sent: dict[str, Tensor], inputs: dict[str, Tensor], *, report: bool, of: str = ""
) -> bool:
    label = f"layout:stride0({', '.join([*inputs, *(f'grad_{n}{of}' for n in sent)])})"
    material = examination.material.with_inputs(inputs)
    run = examination.execute(NAME, label, RunSettings(cotangents=sent), material, look=report)
    if run.error is not None and inputs and examination.target.mutates:
        return True
    if run.error is not None and examination.golden_raises(label, material, run):
        return True
    before = list(examination.findings), list(examination.rows), dict(examination.maps)
    if run.error is not None:
        text = f"{label} is refused: {_first_line(run.error)}"
        examination.find(CERTAIN, NAME, run.phase, text, kind="refused_layout", run=label)
        good = False
    else:
        settled = decisions.settle(examination, run, examination.references(material, run))
        skip = frozenset(examination.bad)
        failed = values.judge(examination, run, settled, NAME, label, noise=False, repeat=None, skip=skip)
        good = not failed - _note_ties(examination, run, settled, failed if inputs else set(), label, len(before[0]))
    if not good and not report:
        examination.findings, examination.rows, examination.maps = before
    return good and not run.overruns


def _note_ties(
    examination: Examination, run: CandidateRun, settled: GoldenResults, failed: set[str], label: str, first_new: int
) -> set[str]:
    """Integer results that differ only because repeated rows tie (as in scaling's values:flat); they become a note.

    first_new: the index of the first finding of this run; findings on the tied results are removed.
    """
    whole = {n for n, _, t in run.results() if t is not None and not t.is_floating_point()}
    tied = {n for n in failed & whole if reach.right_nearby(examination, settled, n, run)}
    if tied:
        examination.findings[first_new:] = [f for f in examination.findings[first_new:] if f.tensor not in tied]
        names = ", ".join(sorted(tied))
        examination.note("compute_range", names, f"{names}: {reach.RIGHT_NEARBY} at {label}; not judged there")
    return tied


def _repeat_first(t: Tensor) -> Tensor:
    axis = next(i for i, n in enumerate(t.shape) if n > 1)
    return t.narrow(axis, 0, 1).expand(t.shape)
