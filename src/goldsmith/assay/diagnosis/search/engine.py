"""Search: runs changed goldens, and keeps the changes whose results equal the candidate's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from ...execute.records import CandidateRun
from ...judge.examination import Examination
from ..edits.golden_edit import NamedEdit
from ..experiments.isolate import named
from ..facts.evidence import WhatIf
from . import offers
from .changed_golden import ChangedGolden
from .free_numbers import sought
from .judge import EXPLAINED, Judge
from .witness import few

_MOST_CHANGES = 4000  # changes to try
_MOST_EXPLANATIONS = 12
_LEAST_SECONDS = 1.0  # CPU seconds: shortest further search for a change that also explains the other results
_EMPTY_GROUP = "empty_group"
# (d, s): after a change that explains the share s of the other results, changes whose prior is lower by d are skipped
_ALL_OTHERS, _MOST_OTHERS = (0.15, 1.0), (0.3, 0.8)


def search(
    examination: Examination, tensor: str, got: Tensor, own: CandidateRun, *, causes: frozenset[str] | None = None
) -> Search | None:
    """A search for changes of the golden that explain the wrong `tensor`; None if nothing can be compared.

    got     the candidate's value of the tensor
    causes  only changes with these causes are tried; None: all
    own     the run that `got` comes from; a change that also explains the other results of this run is better
    """
    bounded = examination.ref.bounded.get(tensor)
    if bounded is None or got.shape != bounded.value.shape or not got.is_floating_point() or not got.numel():
        return None
    judge = Judge(got.detach(), bounded.value, bounded.bound)
    if not judge.error or not bool(got.count_nonzero()):
        return None  # all zeros: a missing tensor needs no change to explain it
    if not bool(judge.finite.any()):  # only an empty group explains NaN everywhere
        causes = frozenset({_EMPTY_GROUP}) & (causes if causes is not None else frozenset({_EMPTY_GROUP}))
        if not causes:
            return None
    return Search(examination, tensor, judge, own, causes)


class Search(ChangedGolden):
    """A search that tries changes in order of their priors; `run` can be called again to continue.

    left: whether untried changes are left.
    """

    def __init__(
        self, examination: Examination, tensor: str, judge: Judge, own: CandidateRun, causes: frozenset[str] | None
    ):
        super().__init__(examination, tensor, judge, own, causes)
        self.left = True
        self._untried: Iterator[tuple[int, NamedEdit]] | None = None
        self._explanations: list[tuple[NamedEdit, WhatIf]] = []
        self._texts: set[tuple[str, str]] = set()
        self._least_prior = 0.0  # changes with this prior or less are not tried

    def run(self, spent: Callable[[], bool]) -> list[WhatIf]:
        """The explanations so far, the best first; continues the search until `spent()` is true.

        The search ends early after a change that explains the whole tensor and the other results: the changes left are
        much rarer. If it does not explain the other results, the search takes as long again and then stops.
        """
        if self._untried is None:
            self._untried = enumerate(self._changes())
        enough = self._enough_time()
        for count, change in self._untried:
            if change.prior <= self._least_prior or count >= _MOST_CHANGES:
                break
            what = self._try(change)
            if what is not None and (what.cause, what.text) not in self._texts:
                self._texts.add((what.cause, what.text))
                self._explanations.append((change, what))
                self._raise_least_prior(change, what)
            if spent() or enough():
                return self._ranked(self._explanations)
        self.left = False
        return self._ranked(self._explanations)

    def explanations(self) -> list[tuple[NamedEdit, WhatIf]]:
        """All changes that explain the tensor so far, unordered."""
        return list(self._explanations)

    def _enough_time(self) -> Callable[[], bool]:
        """A function: whether at least two seconds, and twice the time until the first exact change, have passed."""
        started, exact_after = time.thread_time(), 0.0

        def enough() -> bool:
            nonlocal exact_after
            now = time.thread_time() - started
            if not exact_after and any(w.exact and w.whole and c.free is None for c, w in self._explanations):
                exact_after = max(now, _LEAST_SECONDS)
            return bool(exact_after) and now > exact_after + max(exact_after, _LEAST_SECONDS)

        return enough

    def _raise_least_prior(self, change: NamedEdit, what: WhatIf) -> None:
        if not (what.exact and what.whole and change.free is None and what.prior - _ALL_OTHERS[0] > self._least_prior):
            return
        others = self._share_of_others(change)
        for rarer, share in (_ALL_OTHERS, _MOST_OTHERS):
            if others >= share:
                self._least_prior = max(self._least_prior, what.prior - rarer)

    def _changes(self) -> Iterator[NamedEdit]:
        """The allowed changes that reach the wrong elements, in order of their priors."""
        reached: dict[int, bool] = {}
        for change in sorted(filter(self.allows, offers.of(self)), key=lambda c: -c.prior):
            at = change.only_operator
            if at >= 0 and at not in reached:
                reached[at] = self.reaches(self.nodes[at])
            if at < 0 or reached[at]:
                yield change

    def _try(self, change: NamedEdit) -> WhatIf | None:
        if change.free is not None:
            return sought(self, change)
        value = self.value(change)
        if value is None or not bool(value.count_nonzero()):
            return None
        share, exact = self.judge.explained(value)
        if share < EXPLAINED and change.places & self.before_vanishing - self.vanishing.keys():
            change = change.acting(*self.vanishing.values(), *change.edit.actions)
            value = self.value(change)
            share, exact = self.judge.explained(value)
        text, whole = change.text, True
        if share < EXPLAINED:
            share, exact = self.judge.explained_where_wrong(value)
            text, whole = f"{text}, in the wrong part alone", False
        if share < EXPLAINED or few(self.judge) and not self.explains_other_draws(change):
            return None
        if exact and whole and not self.explains_another_draw(change):
            return None
        value = self.value(change, sure=True)
        if max(self.judge.explained(value), self.judge.explained_where_wrong(value))[0] < EXPLAINED:
            return None  # the golden's own Python code reads the changed tensor, which a replay does not repeat
        params = dict(change.params)
        return WhatIf(
            change.cause, text, self.tensor, share, exact, params, whole, prior=change.prior, also=change.also,
            line=change.edit.line,
        )  # fmt: skip

    def _ranked(self, pairs: list[tuple[NamedEdit, WhatIf]]) -> list[WhatIf]:
        """The explanations in order: exact ones, those that explain the other results, and then by prior."""
        named = (lambda w: w.exact, lambda w: w.whole, lambda w: "value" not in w.params or w.params.get("named"))
        for better in named:  # a fitted number without a meaning in the case may imitate a plain change
            if any(better(w) for _, w in pairs):
                pairs = [(c, w) for c, w in pairs if better(w)]
        pairs = pairs[: 4 * _MOST_EXPLANATIONS]
        if any(c.composed for c, _ in pairs):  # `composed` changes compute no gradients: compare the forward first
            pairs = self._best(pairs, [self._share_of_others(c, forward=True) for c, _ in pairs])
        scored = [(self._share_of_others(c), w) for c, w in pairs]
        best = max((s for (s, w), (c, _) in zip(scored, pairs, strict=True) if not c.composed), default=0.0)
        kept = [replace(w, others=s) for s, w in scored if s >= best - 1e-9]
        # prefer a missing term to a missing factor that makes a sum vanish: it is the simpler explanation
        kept.sort(key=lambda w: (-w.exact, -w.prior, w.cause != "missing_term", -w.match))
        return kept[:_MOST_EXPLANATIONS]

    @staticmethod
    def _best(pairs: list[tuple[NamedEdit, WhatIf]], shares: list[float]) -> list[tuple[NamedEdit, WhatIf]]:
        return [pair for pair, share in zip(pairs, shares, strict=True) if share >= max(shares) - 1e-9]

    def _share_of_others(self, change: NamedEdit, *, forward: bool = False) -> float:
        """The share of the candidate's other results that the change explains; forward: gradients are not counted."""
        if change.free is not None:
            return 1.0
        one_by_one = change.composed is not None  # gradients are not assembled
        forward |= one_by_one
        values = self.run_changed(change, "") if not one_by_one else {}
        if values is None:
            return 0.0
        matching = total = 0
        for other, (_, own_value) in named(self.own).items():
            bounded = self.examination.ref.bounded.get(other)
            if bounded is None or own_value is None or not own_value.is_floating_point() or other == self.tensor:
                continue
            if own_value.shape != bounded.value.shape or not own_value.numel() or forward and other.endswith(".grad"):
                continue
            values = self.run_changed(change, other) or {} if one_by_one else values
            total += 1
            judge = Judge(own_value.detach(), bounded.value, bounded.bound)
            matching += judge.explained(values.get(other))[1]
        return matching / total if total else 1.0


def seconds(limit: float) -> Callable[[], bool]:
    """A function: whether `limit` CPU seconds of this thread have passed (wall time depends on other load)."""
    started = time.thread_time()
    return lambda: time.thread_time() - started > limit
