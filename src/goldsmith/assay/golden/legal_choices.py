"""Which choices among scores are right: those that rounding of the scores can explain.

A chosen score s_c is legal if s_c + e_c >= s_j - e_j for every score s_j that was not chosen (e: rounding bounds).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..bounds.bounded import SLACK, Bounded
from ..execute.records import CandidateRun
from .choice_operators import OperatorChoice, recording
from .golden_results import GoldenResults


@dataclass(frozen=True)
class Illegal:
    """Masks of rows: wrong for any reason; with an index out of range (of elements); with an index twice."""

    rows: Tensor
    outside: Tensor
    repeated: Tensor


def illegal(index: Tensor, value: Tensor, bound: Tensor, *, ordered: bool) -> Illegal:
    """The rows in which these are not the best scores, best first if `ordered`; the last axis is that of the scores.

    Rows with NaN among the scores are never wrong.
    """
    length = value.shape[-1]
    outside = (index < 0) | (index >= length)
    inside = index.clamp(0, max(length - 1, 0))
    repeated = inside.sort(-1).values.diff(dim=-1).eq(0).any(-1) & ~outside.any(-1)
    wrong = outside.any(-1) | repeated
    if ordered:
        best = value.gather(-1, inside) + bound.gather(-1, inside)
        least = value.gather(-1, inside) - bound.gather(-1, inside)
        wrong |= (best[..., :-1] < least[..., 1:]).any(-1)
    chosen = torch.zeros_like(value, dtype=torch.bool).scatter_(-1, inside, True)
    worst_in = torch.where(chosen, value + bound, torch.full_like(value, math.inf)).amin(-1)
    best_out = torch.where(chosen, torch.full_like(value, -math.inf), value - bound).amax(-1)
    wrong |= worst_in < best_out
    return Illegal(wrong & ~torch.isnan(value).any(-1), outside, repeated)


class _RecordedResults(GoldenResults):
    """The golden's results with the scores of each choice among them, under the choice's name."""

    choices: Mapping[str, OperatorChoice]

    def evaluate(self, leaves: Mapping[str, Tensor], **how: bool) -> dict[str, Tensor]:
        with recording() as operators:
            results = super().evaluate(leaves, **how)
        self.choices = operators.choices
        return results | {n: c.scores.detach() for n, c in operators.choices.items()}


@dataclass(frozen=True)
class UndeclaredChoices:
    """Choices of the candidate that the golden did not make, all legal.

    others: choice -> index; tied: results for which any other choice would be as right, in every row.
    """

    others: Mapping[str, Tensor]
    tied: Collection[str]


def undeclared(plain: GoldenResults, run: CandidateRun, *, alike: bool) -> UndeclaredChoices:
    """The candidate's choices that differ from the golden's in results that the target does not declare as decisions.

    A result is a choice if the golden's equals the index of one of its operators. Rows that are illegal, or whose
    scores have no bound, stay as the golden chose. alike: look for ties in results that equal the golden's, too.
    """
    whole = dict(_whole_numbers(plain, run))
    others: dict[str, Tensor] = {}
    tied: list[str] = []
    if all(torch.equal(t, plain.values[n].long()) for n, t in whole.items()) and not (alike and whole):
        return UndeclaredChoices(others, tied)
    recorded = _RecordedResults(plain.material, run, plain.decisions, plain.seed, plain.compute)
    bounded = recorded.bounded
    for name, tensor in whole.items():
        for label, choice in recorded.choices.items():
            index = _as_choice(plain.values[name], tensor, choice)
            if index is None or label not in bounded:
                continue
            scores = _signed(bounded[label], choice)
            if choice.stable and not bool(scores.bound.any()):
                continue  # equal scores keep their order
            if _all_tie(scores) and (choice.ordered or index.shape[-1] < scores.value.shape[-1]):
                tied.append(name)
            own = choice.index.to(index.device)
            first = own[..., : index.shape[-1]]
            wrong = illegal(index, scores.value, scores.bound, ordered=choice.ordered).rows
            wrong |= torch.isnan(scores.value).any(-1)
            legal = torch.where(wrong.unsqueeze(-1), first, index)
            if not torch.equal(legal, first):
                others[label] = _completed(legal, own, scores.value.shape[-1])
    return UndeclaredChoices(others, tied)


def _whole_numbers(plain: GoldenResults, run: CandidateRun) -> Iterator[tuple[str, Tensor]]:
    """The candidate's results of integers that are no declared decisions."""
    for name, _, tensor in run.results():
        if tensor is None or name in plain.material.target.decisions or not tensor.numel():
            continue
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            continue
        golden = plain.values.get(name)
        if golden is not None and golden.shape == tensor.shape:
            yield name, tensor.to(golden.device, torch.int64)


def _as_choice(golden: Tensor, tensor: Tensor, choice: OperatorChoice) -> Tensor | None:
    """The candidate's result as an index of this choice, whose first elements it is; None if it is no such index."""
    index = choice.index.movedim(-1, choice.dim).to(golden.device)
    if golden.numel() == index.numel():
        shape = index.shape
    elif golden.dim() == index.dim() and golden.shape[choice.dim] < index.shape[choice.dim]:
        shape = golden.shape
        index = index.narrow(choice.dim, 0, golden.shape[choice.dim])
    else:
        return None
    if index.numel() != golden.numel() or not torch.equal(index, golden.long().reshape(index.shape)):
        return None
    return tensor.reshape(shape).movedim(choice.dim, -1)


def _signed(scores: Bounded, choice: OperatorChoice) -> Bounded:
    """The scores with the best ones largest; those without a bound count as exact."""
    bound = torch.where(torch.isinf(scores.bound), 0.0, scores.bound * SLACK)
    return Bounded(choice.sign * scores.value, bound, scores.structural_zero, scores.notes)


def _all_tie(scores: Bounded) -> bool:
    """Whether each score may be the best one, and the worst, in every row."""
    least, most = (scores.value + scores.bound).amin(-1), (scores.value - scores.bound).amax(-1)
    return scores.value.shape[-1] > 1 and bool((least >= most).all())


def _completed(index: Tensor, own: Tensor, length: int) -> Tensor:
    """The index with as many elements as the operator's own, whose order the further ones keep."""
    if index.shape[-1] == own.shape[-1]:
        return index
    chosen = torch.zeros((*own.shape[:-1], length), dtype=torch.bool, device=own.device).scatter_(-1, index, True)
    last = chosen.gather(-1, own).to(torch.int8).argsort(dim=-1, stable=True)
    return torch.cat([index, own.gather(-1, last)], -1)[..., : own.shape[-1]]
