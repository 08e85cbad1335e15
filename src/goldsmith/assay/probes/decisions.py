"""Judges discrete results (top-k choices, signs); the golden then continues with the candidate's legal ones.

Choices are legal as golden/legal_choices.py says. A row whose choice differs from the golden's and is legal is a tie: a
note, never a failure. That holds for results that are not declared as well, where the golden's is an operator's index.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...core.tracing import TargetError
from ..bounds.bounded import SLACK, Bounded
from ..declare.decisions import Given, Sign, TopK
from ..execute.records import CandidateRun
from ..golden import other_answers
from ..golden.golden_results import GoldenResults
from ..golden.legal_choices import Illegal, illegal, undeclared
from ..judge.examination import Examination, decided
from ..report.results import CERTAIN, SYSTEMATIC

NAME = "decisions"
UNDETERMINED = "undetermined"  # id of the note on a result that could be any other in a case
MOSTLY = 0.5  # share of a result's elements that rounding changes, from which a note says so


def determined(examination: Examination, reference: GoldenResults, label: str, name: str, tensor: Tensor) -> Tensor:
    """Whole numbers or flags, with the golden's in place of those that rounding may change to what they are."""
    golden = reference.bounded[name].value
    if tensor.shape != golden.shape or torch.equal(tensor.double(), golden):
        return tensor
    runs = [r[name].to(golden.device) for r in (*reference.nudged, *reference.jittered) if name in r]
    runs = [r for r in runs if r.shape == golden.shape]
    mask = other_answers.answered(tensor, golden, runs)
    if label == "values" and float(other_answers.undetermined(golden, runs).double().mean()) > MOSTLY:
        text = f"{name}: rounding changes most of its elements in {examination.label}, so several are right there"
        examination.note(UNDETERMINED, name, text)
    if bool(mask.any()):
        text = f"{int(mask.sum())} of {mask.numel()} elements of {name} are what the golden gives"
        examination.note("tie", name, f"{text} after one more rounding, or where equal inputs differ by a hair")
    return torch.where(mask, golden.to(tensor.dtype), tensor)


def settle(examination: Examination, run: CandidateRun, plain: GoldenResults) -> GoldenResults:
    """The golden's results, computed with the candidate's legal decisions in place of its own."""
    return with_undeclared(examination, run, _with_declared(examination, run, plain))


def with_undeclared(examination: Examination, run: CandidateRun, plain: GoldenResults) -> GoldenResults:
    """The golden's results with the candidate's legal choices in results that are no declared decisions."""
    first = run is examination._first
    choices = undeclared(plain, run, alike=first)
    for name in choices.tied if first else ():
        text = f"{name}: all scores tie in every row of {examination.label}, so any choice is right there"
        examination.note(UNDETERMINED, name, text)
    if not choices.others:
        return plain
    return examination.references(plain.material, run, {**plain.decisions, **choices.others})


def _with_declared(examination: Examination, run: CandidateRun, plain: GoldenResults) -> GoldenResults:
    legal: dict[str, Tensor] = {}
    for name, decision in examination.target.decisions.items():
        choice = _candidate_decision(examination, name, run)
        own = _golden_has(plain, name, "decision")
        if isinstance(decision, Given):
            legal[name] = choice
            _check_drop_rate(examination, name, decision, choice)
            continue
        of = decision.scores if isinstance(decision, TopK) else decision.of
        _golden_has(plain, of, f"the scores behind {name!r}")
        scores = plain.bounded.get(of)
        if scores is None:  # an input is exact
            value = plain.leaves[of]
            scores = Bounded(value, torch.zeros_like(value), torch.zeros_like(value, dtype=torch.bool), [])
        if isinstance(decision, TopK):
            legal[name] = _topk(examination, name, decision, choice, own, scores)
        else:
            legal[name] = _sign(examination, name, decision, choice, own, scores)
    if all(torch.equal(t, plain.values[n].to(t.dtype)) for n, t in legal.items()):
        return plain
    settled = examination.references(plain.material, run, legal)
    _ = settled.values
    ignored = sorted(set(legal) - settled.decisions_used)
    if ignored:
        raise TargetError(
            f"decisions: the golden has no stage {ignored[0]!r}; name it there, assay.stage({ignored[0]!r}, ...), "
            "so that it can go on with the candidate's legal choice"
        )
    return settled


def _candidate_decision(examination: Examination, name: str, run: CandidateRun) -> Tensor:
    """The candidate's decision: an output, a saved output or a stage."""
    decision = decided(run, name)
    if decision is not None:
        return decision
    names = ", ".join([*run.outputs, *run.stages]) or "nothing"
    raise TargetError(f"decisions: {name!r} is neither an output nor a stage of the candidate; there are: {names}")


def _golden_has(plain: GoldenResults, name: str, role: str) -> Tensor:
    if name in plain.values:
        return plain.values[name]
    if name in plain.leaves:
        return plain.leaves[name]
    raise TargetError(
        f"decisions: the golden has no {name!r} ({role}); there are: {', '.join([*plain.values, *plain.leaves])}"
    )


def _scalar(examination: Examination, value: object) -> Any:
    return examination.material.scalars[value] if isinstance(value, str) else value


def _checked_k(examination: Examination, name: str, decision: TopK, scores: Tensor) -> int:
    """The number k of chosen elements, after checking dim and k against the shape of the scores."""
    shape, dim, k = list(scores.shape), decision.dim, _scalar(examination, decision.k)
    where = f"decisions[{name!r}]"
    if not -len(shape) <= dim < len(shape):
        raise TargetError(f"{where}: dim {dim} is no axis of the scores {decision.scores!r}, whose shape is {shape}")
    label = repr(decision.k) if isinstance(decision.k, str) else "k"
    if isinstance(k, bool) or int(k) != k:
        raise TargetError(f"{where}: {label} is {k!r}; the number of choices must be a whole number")
    if not 0 <= k <= shape[dim]:
        available = f"{shape[dim]} along dim {dim} of {decision.scores!r}, whose shape is {shape}"
        raise TargetError(f"{where}: {label} is {k}, but there are only {available}")
    return int(k)


def _topk(examination: Examination, name: str, decision: TopK, choice: Tensor, own: Tensor, scores: Bounded) -> Tensor:
    k = _checked_k(examination, name, decision, scores.value)
    dropped = choice.dim() == scores.value.dim() - 1  # argmax without keepdim
    index = (choice.unsqueeze(decision.dim) if dropped else choice).movedim(decision.dim, -1).long()
    golden = (own.unsqueeze(decision.dim) if dropped else own).movedim(decision.dim, -1).long()
    value, bound = (t.movedim(decision.dim, -1) for t in (scores.value, scores.bound * SLACK))
    if index.shape != (*value.shape[:-1], k):
        text = f"{name} has shape {list(choice.shape)}; expected the {k} best of {list(scores.value.shape)}"
        examination.find(CERTAIN, NAME, name, text, kind="shape")
        return own
    if not index.numel():
        return choice
    illegal_rows = illegal(index, value, bound, ordered=decision.ordered)
    wrong, inside = illegal_rows.rows, index.clamp(0, max(value.shape[-1] - 1, 0))
    _report_topk(examination, name, index, golden, illegal_rows)
    legal = torch.where(wrong.unsqueeze(-1), golden.to(index.device), inside).to(choice.dtype).movedim(-1, decision.dim)
    return legal.squeeze(decision.dim) if dropped else legal


def _report_topk(examination: Examination, name: str, index: Tensor, golden: Tensor, illegal_rows: Illegal) -> None:
    wrong, outside, repeated = illegal_rows.rows, illegal_rows.outside, illegal_rows.repeated
    rows = wrong.numel()
    if bool(wrong.any()):
        reason = "an index out of range" if bool(outside.any()) else "a score that loses"
        reason = "an index twice" if bool(repeated.any()) and not bool(outside.any()) else reason
        where = examination.locate(name, wrong.unsqueeze(-1).expand_as(index))
        text = f"{name} is not a legal choice in {int(wrong.sum())} of {rows} rows: {reason}"
        examination.find(CERTAIN, NAME, name, text, where=where, measured=float(wrong.double().mean()), limit=0.0,
                         kind="illegal_choice", values={"out_of_range": bool(outside.any())})  # fmt: skip
    tied = (index != golden).any(-1) & ~wrong
    if bool(tied.any()):
        text = f"{int(tied.sum())} of {rows} rows choose differently among scores that rounding cannot tell apart"
        examination.note("tie", name, f"{text}; all legal")


def _sign(examination: Examination, name: str, decision: Sign, choice: Tensor, own: Tensor, of: Bounded) -> Tensor:
    if choice.shape != of.value.shape:
        text = f"{name} has shape {list(choice.shape)}, {decision.of} has {list(of.value.shape)}"
        examination.find(CERTAIN, NAME, name, text, kind="shape")
        return own
    positive, golden = choice > 0, of.value > 0
    wrong = (positive != golden) & (of.value.abs() > of.bound * SLACK)
    if bool(wrong.any()):
        text = f"{name} has the wrong side of {decision.of} in {int(wrong.sum())} of {wrong.numel()} elements"
        share = float(wrong.double().mean())
        examination.find(CERTAIN, NAME, name, text, where=examination.locate(name, wrong), measured=share, limit=0.0,
                         kind="wrong_side")  # fmt: skip
    tied = (positive != golden) & ~wrong
    if bool(tied.any()):
        text = f"{int(tied.sum())} of {tied.numel()} elements lie on the kink within their bound"
        examination.note("tie", name, f"{text}; both sides are legal")
    return torch.where(wrong, own.to(choice.dtype), choice)


def _check_drop_rate(examination: Examination, name: str, decision: Given, mask: Tensor) -> None:
    if decision.rate is None or not mask.numel():
        return
    rate, n = float(_scalar(examination, decision.rate)), mask.numel()
    zeros = int((mask == 0).sum())
    spread = math.sqrt(n * rate * (1 - rate))
    if abs(zeros - n * rate) > 6 * spread + 0.5:
        sigmas = abs(zeros - n * rate) / max(spread, 1e-300)
        text = f"{name} drops {zeros} of {n} elements; at rate {rate:g} that is {sigmas:.1f} sigma off"
        examination.find(SYSTEMATIC, NAME, name, text, measured=zeros / n, limit=rate, kind="drop_rate")
