"""Explains an illegal choice (top-k, argmax): by changed scores, or by places that are counted wrongly.

A choice has no residual. For changed scores the test is whether the candidate's choice is the best by them, in every
row of this draw and of another. For the golden's own choice the test is whether miscounted places turn it into the
candidate's. A mask that admits invalid places is reported as such. If another change of the scores explains the choice,
the cause is still a wrong decision, and the evidence describes that change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...bounds.bounded import SLACK
from ...declare.decisions import TopK
from ...execute.records import CandidateRun, Material
from ...golden.golden_error import GoldenError
from ...judge.examination import Examination, decided
from ..facts.evidence import WhatIf
from ..graph.golden import Golden
from . import offers
from .change import Change
from .engine import Search, seconds
from .judge import Judge
from .witness import of_this_draw

_SECONDS = 1.5  # CPU seconds
_MOST, _KEPT = 600, 4
_DRAWS, _LEAST = 2, 3  # other draws to check, and wrong rows, over all draws, that an answer needs
_COMMON = 0.4  # changes with a lower prior explain a few places by chance
_RARER = 0.12  # prior below the first match, at which the search stops
_ROUNDED = 2.0**-20  # relative to the largest score: the rounding of changed scores is not known
_MASKS = frozenset(("wrong_mask", "mask_shift"))
_BLOCKS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, 128, 256)
_SIZES = 8
# the last item maps places, or scores, to what the candidate used
Counted = tuple[str, str, float, tuple[str, ...], Any]


@dataclass(frozen=True)
class _Draw:
    """The choice of one run, as rows, with the golden's choice and the golden's inputs."""

    choice: Tensor
    own: Tensor
    scores: Tensor
    ordered: bool
    golden: Golden
    leaves: Mapping[str, Tensor]

    def legal(self, scores: Tensor) -> Tensor:
        """For each row, whether every chosen score is as good as any other, in order, within rounding."""
        n = scores.shape[-1]
        inside = self.choice.clamp(0, n - 1)
        right = ~inside.sort(-1).values.diff(dim=-1).eq(0).any(-1) & (inside == self.choice).all(-1)
        finite = scores[torch.isfinite(scores)]
        near = SLACK * _ROUNDED * (float(finite.abs().max()) if finite.numel() else 0.0)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, inside, True)
        worst = torch.where(chosen, scores, torch.inf).amin(-1)
        best = torch.where(chosen, -torch.inf, scores).amax(-1)
        if self.ordered:
            picked = scores.gather(-1, inside)
            right &= ~(picked[..., 1:] > picked[..., :-1] + near).any(-1)
        return right & (worst + near >= best) & ~torch.isnan(scores).any(-1)


def explain(examination: Examination, name: str) -> list[WhatIf]:
    """Explanations of an illegal top-k or argmax; empty for other operators."""
    decision = examination.target.decisions.get(name)
    if not isinstance(decision, TopK) or examination._first is None:
        return []
    first = _drawn(examination, name, decision, examination.material, examination.first)
    if first is None or bool(first.legal(first.scores).all()):
        return []
    draws = [first, *_others(examination, name, decision)]
    if sum(int((~d.legal(d.scores)).sum()) for d in draws) < _LEAST:
        return []
    sizes = examination.material.sizes
    explanations = [_what(name, *c[:4]) for c in _counted(first, sizes) if all(_same(d, c[4]) for d in draws)]
    explanations += [
        _what(name, *c[:4]) for c in _cut(first, sizes) if all(_chosen_of(d, c[4](d.scores)) for d in draws)
    ]
    return explanations[:_KEPT] or _by_other_scores(examination, name, decision, draws)


def _drawn(examination: Examination, name: str, decision: TopK, material: Material, run: CandidateRun) -> _Draw | None:
    got = decided(run, name)
    if run.error is not None or got is None:
        return None
    try:
        ref = examination.references(material, run)
        own, scores = ref.values.get(name), ref.values.get(decision.scores, ref.leaves.get(decision.scores))
    except GoldenError:
        return None
    if own is None or scores is None or own.shape != got.shape:
        return None
    dim = decision.dim
    choice, own = (t.unsqueeze(dim) if t.dim() < scores.dim() else t for t in (got.long(), own.long()))
    choice, own, rows = (t.movedim(dim, -1) for t in (choice, own, scores.double()))
    if choice.shape[:-1] != rows.shape[:-1] or not choice.numel() or not rows.shape[-1]:
        return None
    return _Draw(choice, own, rows, decision.ordered, Golden(ref, opened=True), ref.leaves)


# the right choice, counted differently


def _counted(draw: _Draw, sizes: Mapping[str, object]) -> Iterator[Counted]:
    """(cause, text, prior, other causes, map of places)"""
    n = draw.scores.shape[-1]
    known = {v for v in sizes.values() if isinstance(v, int) and not isinstance(v, bool) and 1 < v < n}
    rows = sorted(v for v in known if n % v == 0)[:_SIZES]
    for width in (n, *rows):
        where = "" if width == n else f" within its row of {width}"
        for block in (b for b in _BLOCKS if b < width):
            yield ("invalid_index", f"its positions count from the beginning of their block of {block}{where}", 0.6,
                   ("wrong_stride",), lambda i, w=width, b=block: i // w * w + i % w % b)  # fmt: skip
    for width in rows:
        others = sorted(known - {width})[:_SIZES]
        yield ("invalid_index", f"the offset of its row of {width} is not added", 0.6, ("wrong_stride",),
               lambda i, w=width: i % w)  # fmt: skip
        yield ("invalid_index", f"the number of its row of {width} is used as the position", 0.55, ("wrong_stride",),
               lambda i, w=width: i // w)  # fmt: skip
        other_order = f"its positions are computed with the axes, {n // width} times {width}, in the other order"
        yield ("wrong_stride", other_order, 0.6,
               ("transposed", "invalid_index"), lambda i, w=width: i % w * (n // w) + i // w)  # fmt: skip
        for other in (width - 1, width + 1, *others):
            yield ("wrong_stride", f"a row of {width} counts as {other} positions", 0.5, ("invalid_index",),
                   lambda i, w=width, o=other: i // w * o + i % w)  # fmt: skip
    for step in (1, -1):
        yield (
            "off_by_one",
            f"every position is off by {step:+d}",
            0.5,
            ("shifted", "invalid_index"),
            lambda i, s=step: i + s,
        )
    yield "permuted", "it is in reverse order", 0.5, ("wrong_decision",), lambda i: i.flip(-1)


def _cut(draw: _Draw, sizes: Mapping[str, object]) -> Iterator[Counted]:
    """A part of every row is never chosen: an end, an incomplete block, or all blocks but the first or the last.

    The last item of each result gives the remaining scores.
    """
    n = draw.scores.shape[-1]
    known = {v for v in sizes.values() if isinstance(v, int) and not isinstance(v, bool) and 2 < v < n}
    for width in (n, *sorted(v for v in known if n % v == 0)[:_SIZES]):
        blocks = [b for b in _BLOCKS if b < width]
        kinds = [
            ("truncated_reduction", 0, 1, "the last position"),
            ("truncated_reduction", 1, 0, "the first position"),
        ]
        rests = dict.fromkeys(width % b for b in blocks if width % b > 1)
        kinds += [("truncated_reduction", 0, r, f"any of the last {r} positions") for r in rests]
        kinds += [("truncated_reduction", 0, width - b, f"anything after the first {b} positions") for b in blocks]
        last = dict.fromkeys((width - 1) // b * b for b in blocks)
        kinds += [("overwritten_accumulator", a, 0, f"anything before position {a}") for a in last if a > 1]
        place = torch.arange(n, device=draw.scores.device) % width
        for cause, before, after, which in kinds:
            left_out = (place < before) | (place >= width - after)
            also = ("wrong_decision", "wrong_mask", "off_by_one" if max(before, after) == 1 else "truncated_reduction")
            yield (cause, f"of every {width} positions, {which} is never chosen", 0.55, also,
                   lambda s, m=left_out: s.masked_fill(m, -torch.inf))  # fmt: skip


def _chosen_of(draw: _Draw, scores: Tensor) -> bool:
    """Whether the choice is the best among the remaining places, and uses only those."""
    at = draw.choice.clamp(0, scores.shape[-1] - 1)
    return torch.equal(scores.gather(-1, at), draw.scores.gather(-1, at)) and bool(draw.legal(scores).all())


def _same(draw: _Draw, counted: Callable[[Tensor], Tensor]) -> bool:
    """Whether it equals the golden's choice in every row; where scores tie, several choices are equal."""
    return not torch.equal(draw.choice, draw.own) and torch.equal(counted(draw.own), draw.choice)


# other scores


def _by_other_scores(examination: Examination, name: str, decision: TopK, draws: list[_Draw]) -> list[WhatIf]:
    search = _search(examination, decision, draws[0])
    if search is None:
        return []
    over, matches = seconds(_SECONDS), list[Change]()
    changes = sorted(offers.of(search, search._calls()), key=lambda c: -c.prior)
    for change in changes[:_MOST]:
        if over() or change.prior < (matches[0].prior - _RARER if matches else _COMMON) or len(matches) >= _KEPT:
            break
        if change.free is not None or change.drawn or change.composed is not None:
            continue
        if all(_explains(search, change, draw, decision) for draw in draws[: 1 if of_this_draw(change) else None]):
            matches.append(change)
    masks = [c for c in matches if c.cause in _MASKS]
    explanations = [
        _what(name, c.cause, f"{decision.scores} is another: {c.text}", c.prior, c.also) for c in masks or matches
    ]
    return explanations if masks else [_criterion(name, w) for w in explanations]


def _criterion(name: str, what: WhatIf) -> WhatIf:
    also = tuple(dict.fromkeys((what.cause, *what.also)))
    return WhatIf("wrong_decision", what.text, name, 1.0, True, {"choice": name}, prior=what.prior, also=also)


def _search(examination: Examination, decision: TopK, first: _Draw) -> Search | None:
    """A search for changes of the scores; only the wrong rows are known, not the wrong scores."""
    bounded = examination.ref.bounded.get(decision.scores)
    if bounded is None:
        return None
    rows = (~first.legal(first.scores)).unsqueeze(-1).expand_as(first.scores).movedim(-1, decision.dim)
    got = torch.where(rows, bounded.value + 1, bounded.value)
    judge = Judge(got, bounded.value, bounded.bound)
    return Search(examination, decision.scores, judge, examination.first, None)


def _others(examination: Examination, name: str, decision: TopK) -> list[_Draw]:
    draws = []
    for salt in range(1, _DRAWS + 1):
        material = examination.variant(salt)
        run = examination.execute("whatif", f"other inputs {salt}", material=material, look=False)
        draw = _drawn(examination, name, decision, material, run)
        draws += [] if draw is None else [draw]
    return draws


def _explains(search: Search, change: Change, draw: _Draw, decision: TopK) -> bool:
    """Whether the choice is legal by the changed golden's scores."""
    leaves = dict(draw.leaves)
    try:
        leaves |= change.leaves(leaves) if change.leaves is not None else {}
    except (RuntimeError, ZeroDivisionError):
        return False
    values = search.values_after(
        change.at, change.change, leaves, decision.scores, change.wrap, change.saved, change.group, draw.golden,
        change.scalars,
    )  # fmt: skip
    value = (values or {}).get(decision.scores)
    if value is None or not value.is_floating_point():
        return False
    rows = value.double().movedim(decision.dim, -1)
    return rows.shape == draw.scores.shape and bool(draw.legal(rows).all())


def _what(name: str, cause: str, text: str, prior: float, also: tuple[str, ...]) -> WhatIf:
    return WhatIf(cause, text, name, 1.0, True, {"choice": name}, prior=prior, also=also)
