"""Discrete results are judged before what rests on them; then the golden goes on with the candidate's legal ones.

A chosen score s_c is legal when s_c + e_c >= s_j - e_j for every score s_j that was left out (e: rounding bounds).
Rows with another choice than the golden's, all of them legal, are ties: a note, never a failure.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...core.tracing import TargetError
from ..bounds.bounded import SLACK, Bounded
from ..declare.decisions import Given, Sign, TopK
from ..execute.run import CandidateRun
from ..golden.golden_results import GoldenResults
from ..judge.examination import Examination, decided
from ..report.results import CERTAIN, SYSTEMATIC

NAME = "decisions"


def settle(examination: Examination, done: CandidateRun, plain: GoldenResults) -> GoldenResults:
    """GoldenResults with the candidate's legal decisions in place of the golden's own."""
    taken: dict[str, Tensor] = {}
    for name, decision in examination.target.decisions.items():
        made = _made(examination, name, done)
        own = _golden_has(plain, name, "decision")
        if isinstance(decision, Given):
            taken[name] = made
            _rate(examination, name, decision, made)
            continue
        of = decision.scores if isinstance(decision, TopK) else decision.of
        _golden_has(plain, of, f"what {name!r} was decided on")
        scores = plain.bounded.get(of)
        if scores is None:  # an input: exact
            value = plain.leaves[of]
            scores = Bounded(value, torch.zeros_like(value), torch.zeros_like(value, dtype=torch.bool), [])
        if isinstance(decision, TopK):
            taken[name] = _topk(examination, name, decision, made, own, scores)
        else:
            taken[name] = _sign(examination, name, decision, made, own, scores)
    if all(torch.equal(t, plain.values[n].to(t.dtype)) for n, t in taken.items()):
        return plain
    settled = examination.references(plain.material, done, taken)
    _ = settled.values
    ignored = sorted(set(taken) - settled.decisions_used)
    if ignored:
        raise TargetError(
            f"decisions: the golden has no stage {ignored[0]!r}; name it there, assay.stage({ignored[0]!r}, ...), "
            "so that it can go on with the candidate's legal choice"
        )
    return settled


def _made(examination: Examination, name: str, done: CandidateRun) -> Tensor:
    """The candidate's decision: an output, a saved output or a stage."""
    found = decided(done, name)
    if found is not None:
        return found
    made = ", ".join([*done.outputs, *done.stages]) or "nothing"
    raise TargetError(f"decisions: {name!r} is neither an output nor a stage of the candidate; there are: {made}")


def _golden_has(plain: GoldenResults, name: str, what: str) -> Tensor:
    if name in plain.values:
        return plain.values[name]
    if name in plain.leaves:
        return plain.leaves[name]
    raise TargetError(
        f"decisions: the golden has no {name!r} ({what}); there are: {', '.join([*plain.values, *plain.leaves])}"
    )


def _number(examination: Examination, value: Any) -> Any:
    return examination.material.scalars[value] if isinstance(value, str) else value


def _asked(examination: Examination, name: str, decision: TopK, scores: Tensor) -> int:
    """k, where the scores have the declared axis and so many along it: otherwise the declaration is wrong."""
    shape, dim, k = list(scores.shape), decision.dim, _number(examination, decision.k)
    where = f"decisions[{name!r}]"
    if not -len(shape) <= dim < len(shape):
        raise TargetError(f"{where}: dim {dim} is no axis of the scores {decision.scores!r}, whose shape is {shape}")
    said = repr(decision.k) if isinstance(decision.k, str) else "k"
    if isinstance(k, bool) or int(k) != k:
        raise TargetError(f"{where}: {said} is {k!r}; how many are chosen is a whole number")
    if not 0 <= k <= shape[dim]:
        there = f"{shape[dim]} along dim {dim} of {decision.scores!r}, whose shape is {shape}"
        raise TargetError(f"{where}: {said} is {k}, and there are {there}")
    return int(k)


def _topk(examination: Examination, name: str, decision: TopK, made: Tensor, own: Tensor, scores: Bounded) -> Tensor:
    k = _asked(examination, name, decision, scores.value)
    dropped = made.dim() == scores.value.dim() - 1  # argmax without keepdim
    index = (made.unsqueeze(decision.dim) if dropped else made).movedim(decision.dim, -1).long()
    golden = (own.unsqueeze(decision.dim) if dropped else own).movedim(decision.dim, -1).long()
    value, bound = (t.movedim(decision.dim, -1) for t in (scores.value, scores.bound * SLACK))
    if index.shape != (*value.shape[:-1], k):
        text = f"{name} has shape {list(made.shape)}; the {k} best of {list(scores.value.shape)} were asked for"
        examination.find(CERTAIN, NAME, name, text)
        return own
    if not index.numel():
        return made
    length = value.shape[-1]
    outside = (index < 0) | (index >= length)
    inside = index.clamp(0, max(length - 1, 0))
    repeated = inside.sort(-1).values.diff(dim=-1).eq(0).any(-1) & ~outside.any(-1)
    wrong = outside.any(-1) | repeated
    if decision.ordered:
        best = value.gather(-1, inside) + bound.gather(-1, inside)
        least = value.gather(-1, inside) - bound.gather(-1, inside)
        wrong |= (best[..., :-1] < least[..., 1:]).any(-1)
    chosen = torch.zeros_like(value, dtype=torch.bool).scatter_(-1, inside, True)
    worst_in = torch.where(chosen, value + bound, torch.full_like(value, math.inf)).amin(-1)
    best_out = torch.where(chosen, torch.full_like(value, -math.inf), value - bound).amax(-1)
    wrong |= worst_in < best_out
    wrong &= ~torch.isnan(value).any(-1)
    _report(examination, name, index, golden, wrong, outside, repeated)
    legal = torch.where(wrong.unsqueeze(-1), golden.to(index.device), inside).to(made.dtype).movedim(-1, decision.dim)
    return legal.squeeze(decision.dim) if dropped else legal


def _report(
    examination: Examination, name: str, index: Tensor, golden: Tensor, wrong: Tensor, outside: Tensor, repeated: Tensor
) -> None:
    rows = wrong.numel()
    if bool(wrong.any()):
        reason = "an index out of range" if bool(outside.any()) else "a score that loses"
        reason = "an index twice" if bool(repeated.any()) and not bool(outside.any()) else reason
        where = examination.locate(name, wrong.unsqueeze(-1).expand_as(index))
        text = f"{name} is not a legal choice in {int(wrong.sum())} of {rows} rows: {reason}"
        examination.find(CERTAIN, NAME, name, text, where=where, measured=float(wrong.double().mean()), limit=0.0)
    tied = (index != golden).any(-1) & ~wrong
    if bool(tied.any()):
        text = f"{int(tied.sum())} of {rows} rows choose otherwise among scores that rounding cannot tell apart"
        examination.note("tie", name, f"{text}; all legal")


def _sign(examination: Examination, name: str, decision: Sign, made: Tensor, own: Tensor, of: Bounded) -> Tensor:
    if made.shape != of.value.shape:
        text = f"{name} has shape {list(made.shape)}, {decision.of} has {list(of.value.shape)}"
        examination.find(CERTAIN, NAME, name, text)
        return own
    said, golden = made > 0, of.value > 0
    wrong = (said != golden) & (of.value.abs() > of.bound * SLACK)
    if bool(wrong.any()):
        text = f"{name} has the wrong side of {decision.of} in {int(wrong.sum())} of {wrong.numel()} elements"
        share = float(wrong.double().mean())
        examination.find(CERTAIN, NAME, name, text, where=examination.locate(name, wrong), measured=share, limit=0.0)
    tied = (said != golden) & ~wrong
    if bool(tied.any()):
        text = f"{int(tied.sum())} of {tied.numel()} elements lie on the kink within their bound"
        examination.note("tie", name, f"{text}; both sides are legal")
    return torch.where(wrong, own.to(made.dtype), made)


def _rate(examination: Examination, name: str, decision: Given, made: Tensor) -> None:
    if decision.rate is None or not made.numel():
        return
    rate, n = float(_number(examination, decision.rate)), made.numel()
    zeros = int((made == 0).sum())
    spread = math.sqrt(n * rate * (1 - rate))
    if abs(zeros - n * rate) > 6 * spread + 0.5:
        sigmas = abs(zeros - n * rate) / max(spread, 1e-300)
        text = f"{name} drops {zeros} of {n} elements; at rate {rate:g} that is {sigmas:.1f} sigma off"
        examination.find(SYSTEMATIC, NAME, name, text, measured=zeros / n, limit=rate)
