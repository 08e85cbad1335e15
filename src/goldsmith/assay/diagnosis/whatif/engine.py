"""Search: runs changed goldens, and keeps the changes whose results equal the candidate's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ...execute.records import CandidateRun
from ...judge.examination import Examination
from ..edits.golden_edit import Action, EditedRun, NamedEdit
from ..edits.saved import THROUGH
from ..experiments.isolate import named
from ..facts.evidence import WhatIf
from ..facts.numbers import known
from ..graph.golden import Golden
from ..graph.graph import followed
from ..graph.node import Changed, Instead, Key, Node, behind, compared
from ..graph.recording import Listening
from ..graph.replay import Replay, Unknown, taped
from . import offers
from .free_numbers import EXPLAINED, sought
from .judge import Judge
from .vanishing import vanishing
from .whole_runs import composed_slices
from .witness import Operators, Witness, called, few, operators

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


class Search:
    """A search that tries changes in order of their priors; `run` can be called again to continue.

    left       whether untried changes are left
    left_out   kinds of changes that could not be offered for this golden -> the error
    """

    def __init__(
        self, examination: Examination, tensor: str, judge: Judge, own: CandidateRun, causes: frozenset[str] | None
    ):
        self.examination, self.tensor, self.judge, self.own = examination, tensor, judge, own
        self.causes, self.left = causes, True
        self.left_out: dict[str, str] = {}
        self.behind: set[int] = set()  # the operators that the wrong tensor depends on
        self.operators: frozenset[str] = frozenset()  # their names
        self.alike = ""  # the expression of another tensor of the golden that equals the wrong one
        self.golden = Golden(examination.ref, opened=not tensor.endswith(".grad"))
        self.leaves = examination.ref.leaves
        material = examination.material
        self.numbers = known(material.scalars, material.sizes, material.inputs)

        self._untried: Iterator[tuple[int, NamedEdit]] | None = None
        self._explanations: list[tuple[NamedEdit, WhatIf]] = []
        self._texts: set[tuple[str, str]] = set()
        self._least_prior = 0.0  # changes with this prior or less are not tried
        self._witnesses: list[Witness] | None = None
        self._calls: list[Node] = []  # the operators of the recorded run
        self._vanishing: dict[int, Action] = {}  # operators whose result is 0 for every input
        self._before_vanishing: set[int] = set()  # the operators that `_vanishing` depend on
        self._compared: set[int] = set()  # operators whose results are compared, so that a choice depends on them

    def run(self, spent: Callable[[], bool]) -> list[WhatIf]:
        """The explanations so far, the best first; continues the search until `spent()` is true.

        The search ends early after a change that explains the whole tensor and the other results: the changes left are
        much rarer. If it does not explain the other results, the search takes as long again and then stops.
        """
        if self._untried is None:
            self._untried = enumerate(self._changes(self.record()))
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

    def record(self) -> list[Node]:
        """The operators of a run, whose names and dependences the search keeps."""
        mode = Listening().record()
        value = self.golden.run_under(mode, self.leaves, self.tensor).get(self.tensor)
        calls = self._calls = mode.calls or []
        key = -1 if value is None else mode.key_of(value)
        self.behind = set(range(len(calls))) if key == -1 else behind(calls, key)
        self.operators = frozenset(call.name for call in calls if call.index in self.behind)
        self._vanishing = vanishing(calls, self.behind)
        self._before_vanishing = {i for at in self._vanishing for i in behind(calls, at)}
        self._compared = compared(calls, self.behind)
        others = [c for c in calls if isinstance(c.out, Tensor) and c.index != key]
        self.alike = next((c.expression for c in others if self.judge.explained(c.out.detach())[1]), "")
        return calls

    def _changes(self, calls: list[Node]) -> Iterator[NamedEdit]:
        """The allowed changes that reach the wrong elements, in order of their priors."""
        reached: dict[int, bool] = {}
        for change in sorted(filter(self.allows, offers.of(self, calls)), key=lambda c: -c.prior):
            at = change.only_operator
            if at >= 0 and at not in reached:
                reached[at] = self._reaches(calls[at])
            if at < 0 or reached[at]:
                yield change

    def allows(self, change: NamedEdit) -> bool:
        return self.causes is None or change.cause in self.causes or change.free is not None

    def _reaches(self, call: Node) -> bool:
        """Whether NaN in the operator's result reaches every wrong element."""

        def poisoned(func: Any, args: tuple, kwargs: dict) -> Any:
            out = func(*args, **kwargs)
            if isinstance(out, Tensor) and out.is_floating_point():
                return out.fill_(torch.nan) if func._schema.is_mutable else torch.full_like(out, torch.nan)
            return out

        if not isinstance(call.out, Tensor) or not call.out.is_floating_point():
            return True
        value = (self.values_after({call.index: poisoned}, self.tensor) or {}).get(self.tensor)
        if value is None or bool((torch.isnan(value) | ~self.judge.wrong_at).all()):
            return True
        return (
            call.index in self._compared
        )  # a comparison with NaN is false and selects a number, so NaN may not arrive

    @cached_property
    def replay(self) -> Replay | None:
        """The recorded run up to the tensor, to recompute only what a change affects; None if it cannot be recorded."""
        with suppress(RuntimeError, NotImplementedError):  # storage of another kind
            return taped(lambda tape: self.golden.run_under(tape, self.leaves, self.tensor), self.tensor)
        return None

    def values_after(
        self, changes: Mapping[int, Changed], until: str, leaves: Mapping[str, Tensor] | None = None, wrap: str = "",
        saved: Instead | None = None, golden: Golden | None = None, scalars: Mapping[str, Any] | None = None,
        sure: bool = False,
    ) -> dict[str, Tensor] | None:  # fmt: skip
        """The golden's tensors up to `until` with these operators changed, or None if it raises.

        sure: run the whole golden, even if a replay of the recorded run is possible.
        """
        leaves, golden = self.leaves if leaves is None else leaves, golden or self.golden
        own = golden is self.golden and until == self.tensor and not (wrap or scalars or sure)
        try:
            if own and self.replay is not None:
                with suppress(Unknown):
                    other = {n: t for n, t in leaves.items() if t is not self.leaves.get(n)}
                    return {until: self.replay.value(changes, other, saved)}
            return golden.run_under(Listening(dict(changes), wrap=wrap, saved=saved), leaves, until, scalars)
        except Exception:  # noqa: BLE001 - for example shapes that do not fit
            return None

    def _run_changed(
        self, change: NamedEdit, until: str, draw: Witness | None = None, *, sure: bool = False
    ) -> dict[str, Tensor] | None:
        leaves, golden = (self.leaves, self.golden) if draw is None else (draw.leaves, draw.golden)
        run, edit = EditedRun(change.edit), change.edit
        try:
            if change.before is not None:
                change.before(leaves)
            leaves = {**leaves, **run.inputs(leaves)} if run.needs_inputs and not edit.backward_only else leaves
        except (RuntimeError, ZeroDivisionError):  # for example numbers that the input's dtype cannot hold
            return None
        if change.composed is not None:
            return composed_slices.composed_values(
                change, leaves, lambda other: self.values_after({}, until, other, golden=golden, sure=sure), until
            )
        if edit.backward_only:
            return self.values_after({}, until, leaves, saved=partial(self._saved, run), golden=golden, sure=sure)
        changes = dict(run.changes())
        return self.values_after(changes, until, leaves, edit.wrap, change.saved, golden, dict(edit.scalars), sure)

    def _saved(self, run: EditedRun, tensors: Mapping[Key, Tensor]) -> Mapping[Key, Tensor]:
        """What the backward reads instead; copies of the edited tensors change with them."""
        return followed(self._calls, run.saved(tensors), THROUGH)

    def explains_other_draws(self, change: NamedEdit) -> bool:
        """Whether the change also explains the candidate's results for other draws of the case."""
        if self._witnesses is None:
            self._witnesses = called(self.examination, self.tensor, self.own, self.judge)
        for draw in self._witnesses:
            if change.redone is not None:
                if draw.judge.error and all(c.cause != change.cause for c in change.redone(*self._context_of(draw))):
                    return False
                continue
            share, exact = draw.judge.explained((self._run_changed(change, self.tensor, draw) or {}).get(self.tensor))
            if share < EXPLAINED and not exact:
                return False
        return True

    def _context_of(self, draw: Witness) -> tuple[list[Node], Judge]:
        """The recorded operators and the judge of another draw, from which `Change.redone` finds changes there."""
        mode = Listening().record()
        draw.golden.run_under(mode, draw.leaves, self.tensor)
        return mode.calls or [], draw.judge

    @cached_property
    def all_operators(self) -> Operators:
        """All operators of the golden in order, forward and backward."""
        return operators(self.golden, self.leaves)

    def _explains_another_draw(self, change: NamedEdit) -> bool:
        """Whether a change that explains one draw also explains another; True if this cannot be tested.

        It can be tested only if the golden calls the same operators on both draws, because a change names an operator
        by its index.
        """
        if few(self.judge) or change.drawn or change.composed is not None or change.of_this_draw:
            return True
        if self._witnesses is None:
            self._witnesses = called(self.examination, self.tensor, self.own, self.judge)
        alike = [draw for draw in self._witnesses if draw.operators == self.all_operators]
        return not alike or self.explains_other_draws(change)

    def _try(self, change: NamedEdit) -> WhatIf | None:
        if change.free is not None:
            return sought(self, change)
        value = (self._run_changed(change, self.tensor) or {}).get(self.tensor)
        if value is None or not bool(value.count_nonzero()):
            return None
        share, exact = self.judge.explained(value)
        if share < EXPLAINED and change.places & self._before_vanishing - self._vanishing.keys():
            edit = replace(change.edit, actions=(*self._vanishing.values(), *change.edit.actions))
            change = replace(change, edit=edit)
            value = (self._run_changed(change, self.tensor) or {}).get(self.tensor)
            share, exact = self.judge.explained(value)
        if value is None:
            return None
        text, whole = change.text, True
        if share < EXPLAINED:
            share, exact = self.judge.explained_where_wrong(value)
            text, whole = f"{text}, in the wrong part alone", False
        if share < EXPLAINED or few(self.judge) and not self.explains_other_draws(change):
            return None
        if exact and whole and not self._explains_another_draw(change):
            return None
        value = (self._run_changed(change, self.tensor, sure=True) or {}).get(self.tensor)
        if value is None or max(self.judge.explained(value), self.judge.explained_where_wrong(value))[0] < EXPLAINED:
            return None  # the golden's own Python code reads the changed tensor, which a replay does not repeat
        params = dict(change.params)
        return WhatIf(
            change.cause, text, self.tensor, share, exact, params, whole, prior=change.prior, also=change.also
        )

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
        values = self._run_changed(change, "") if not one_by_one else {}
        if values is None:
            return 0.0
        matching = total = 0
        for other, (_, own_value) in named(self.own).items():
            bounded = self.examination.ref.bounded.get(other)
            if bounded is None or own_value is None or not own_value.is_floating_point() or other == self.tensor:
                continue
            if own_value.shape != bounded.value.shape or not own_value.numel() or forward and other.endswith(".grad"):
                continue
            values = self._run_changed(change, other) or {} if one_by_one else values
            total += 1
            judge = Judge(own_value.detach(), bounded.value, bounded.bound)
            matching += judge.explained(values.get(other))[1]
        return matching / total if total else 1.0


def seconds(limit: float) -> Callable[[], bool]:
    """A function: whether `limit` CPU seconds of this thread have passed (wall time depends on other load)."""
    started = time.thread_time()
    return lambda: time.thread_time() - started > limit
