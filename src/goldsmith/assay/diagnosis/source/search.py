"""Searches for a patch: edits by cost, tried on the failing cases; what survives faces every case and every probe."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...declare.target import Target
from ...golden.golden_error import GoldenError
from ...judge.examination import Examination
from ..facts.evidence import WhatIf
from ..trace.faulty_line import FaultyLine
from .acceptance import Acceptance
from .children.mutants import EditOutcome, Mutants
from .cpp.cpp_edits import CppEdits
from .edits.edit_queue import EditQueue, place
from .edits.edits import Edit, Line
from .edits.every_edit import EveryEdit
from .edits.further_edits import FurtherEdits
from .edits.inverse_edits import NO_HINT, GoldenHint, inverse_kinds
from .foreign_changes import foreign_change
from .patch import Patch
from .problems import STRAY, Problem, of_examination, with_layouts
from .proposals import proposals
from .reading.candidate_source import CandidateSource, NativeSource, NoSource, candidate_source
from .survivors import Survivors

_SHARE, _UNBOUNDED = 0.7, 60.0  # of the budget of a diagnosis; seconds if there is none
_PROCESSES = min(2, len(os.sched_getaffinity(0)))  # that try edits; each needs 0.3 GiB
_BATCH, _SLOW = 40, 0.1  # edits that are tried before the right ones are judged; fewer if a run takes longer than this
_SECOND, _WHOLE = 0.35, 0.6  # shares of the time for a second edit, if single ones mend a part, or a whole result
_PART = 0.5  # share of the wrong elements that an edit must leave, at most, if it mends no whole result
_EQUALS = 0.15  # share of the time in which other edits that do the same are looked for, once one is found
_PROPOSING = 0.5  # share of the time for the program that proposes patches
_FIRSTS = 3  # edits that mend a part and are tried with a second one
_LAYOUTS = 0.3  # share of the time for a second edit, if the first leaves other layouts wrong
_OUTCOMES = {
    "wrong": "the failing case is wrong with it", "raised": "it raises", "slow": "it is too slow",
    "crashed": "it ends its process",
}  # fmt: skip
Progress = Callable[[str], None]


@dataclass
class PatchSearch:
    """How a search ended.

    reason: one sentence if there is no patch; interrupted: by Ctrl-C, before its time; refused:
    one sentence for each proposal that was not taken.
    """

    patch: Patch | None = None
    reason: str = ""
    tried: int = 0
    rejected: list[Edit] = field(default_factory=list)
    interrupted: bool = False
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Hints:
    """Where to begin.

    lines   that a trace names, before all
    region  (file, line) of what leads from there to the wrong results; beside: of all else that ran, after the rest
    reading (file, line) of what says where those lines read
    causes  kinds of edits that undo the golden-side edits that fit; named: the names and numbers in those
    """

    lines: Collection[Line] = ()
    causes: Collection[str] = ()
    region: Collection[tuple[str, int]] = ()
    beside: Collection[tuple[str, int]] = ()
    reading: Collection[tuple[str, int]] = ()
    named: GoldenHint = NO_HINT


@dataclass
class _Deadline:
    until: float
    seconds: float

    @property
    def left(self) -> float:
        return self.until - time.monotonic()


def patch_seconds(budget: float | None, spent: float) -> float:
    """Seconds for a search: a share of the budget, and no more than is left of it."""
    return _UNBOUNDED if budget is None else min(_SHARE * budget, budget - spent)


def find_patch(
    target: Target,
    examinations: Sequence[Examination],
    seconds: float,
    *,
    line: FaultyLine | None = None,
    causes: Sequence[str] = (),
    whatifs: Sequence[WhatIf] = (),
    progress: Progress = lambda text: None,
    propose: str | None = None,
    evidence: Mapping[str, object] | None = None,
) -> PatchSearch:
    """The smallest edit of the candidate's source that passes everything.

    examinations: failing ones of this target, the smallest first. A keyboard interrupt ends the search early.
    line: that a trace names, to try before all others
    causes: ids of causes, whose inverse edits are tried earlier
    whatifs: golden-side edits that fit; edits that bring their names and numbers in or out come earlier, and those of
    statements that read what the edited line of the golden reads
    propose: a command that gets the evidence and returns patches, which are tried before all edits
    """
    clock = _Deadline(time.monotonic() + seconds, seconds)
    search = PatchSearch()
    hints = Hints(causes=inverse_kinds(causes), named=GoldenHint.of(whatifs))
    if line is not None:
        at = line.at.file, line.at.line, line.at.function
        hints = replace(hints, lines=[at], region=line.region, beside=line.beside, reading=line.reading)
    try:
        source = candidate_source(target)
        problems = [p for e in dict.fromkeys(examinations) for p in [of_examination(e)] if p is not None]
        if not problems:
            raise NoSource("the failing run has no numbers that an edited copy could be compared with")
        if any(f.kind in STRAY for e in examinations for f in e.findings):
            problems = [{**p, "banded": True} for p in problems]
        on_cuda = examinations[0].material.candidate_device.type == "cuda"
        with Mutants(source, problems, on_cuda=on_cuda, processes=_PROCESSES) as mutants:
            if mutants.original.state == "right":
                raise NoSource("the failing case is right in a plain run, so that it cannot tell edits apart")
            acceptance = Acceptance(target, source, examinations[0], mutants.original.wrong)
            survivors = Survivors(acceptance, source, mutants, examinations[0], progress)
            hunt = _Hunt(search, mutants, survivors, clock, hints, progress)
            try:
                if propose is not None:
                    offered = proposals(propose, source, evidence or {}, _PROPOSING * seconds)
                    search.refused += offered.refused
                    survivors.adopt(_judged(offered.edits, target, source, problems, survivors, hunt, on_cuda))
                hunt.run(_every_edit(source, mutants))
                if survivors.found_at is None and hunt.better:
                    _mend_rest(hunt)
                if survivors.best is None and survivors.with_layouts:
                    _mend_layouts(hunt, source, problems, on_cuda)
                if survivors.best is None:
                    survivors.take_what_remains()
            except KeyboardInterrupt:
                search.interrupted = True
            search.patch, search.rejected = survivors.patch(search.tried), survivors.rejected
            if search.patch is None and not search.interrupted:
                count = search.tried
                search.reason = (
                    f"No patch: {count} edits of the candidate's source were tried, and none of them passes."
                )
    except NoSource as error:
        search.reason = f"No patch was looked for: {error}."
    return search


def _every_edit(source: CandidateSource, mutants: Mutants) -> EveryEdit | CppEdits:
    wrong = mutants.original.wrong
    if isinstance(source, NativeSource):
        return CppEdits(source.data, wrong)
    return EveryEdit(source.parts, wrong, mutants.kinds, source.golden)


def _judged(
    edits: Sequence[Edit], target: Target, source: CandidateSource, problems: Sequence[Problem], others: Survivors,
    hunt: _Hunt, on_cuda: bool,
) -> Survivors:  # fmt: skip
    """The proposals that pass what every edit passes, run in a sandbox."""
    search, acceptance = hunt.search, replace(others.acceptance, boxed=True)
    with Mutants(source, problems, on_cuda=on_cuda, boxed=True) as mutants:
        survivors = Survivors(acceptance, source, mutants, others.examination, hunt.progress)
        for edit in edits:
            text = mutants.texts(edit)[edit.path]
            why = foreign_change(target, source, edit.path, text)
            outcome = None if why else next(iter(mutants.tried([edit])))[1]
            search.tried += 1
            before = len(survivors.accepted)
            if outcome is not None and outcome.state == "right":
                survivors.judge(edit, hunt.clock.left, outcome.stages)
                why = (
                    "" if len(survivors.accepted) > before else "it is right on the failing case, and not on all others"
                )
            elif outcome is not None:
                why = _OUTCOMES[outcome.state]
            search.refused += [f"the proposal for line {edit.line}: {why}"] if why else []
            if survivors.full or hunt.clock.left <= 0:
                break
    return survivors


@dataclass
class _Hunt:
    """One run through the edits of a source.

    start: the outcome before them, where it is not that of the files as they are; better: edits that mend a part
    """

    search: PatchSearch
    mutants: Mutants
    survivors: Survivors
    clock: _Deadline
    hints: Hints
    progress: Progress
    start: EditOutcome | None = None
    better: list[tuple[EditOutcome, Edit]] = field(default_factory=list)
    edits: EveryEdit | CppEdits | FurtherEdits | None = None
    queue: EditQueue | None = None

    def run(self, edits: EveryEdit | CppEdits | FurtherEdits) -> None:
        start = self.start or self.mutants.original
        around = edits.around(self.hints.lines) | edits.places(self.hints.reading)
        beside = edits.places(self.hints.beside) - edits.places(self.hints.region) - edits.branches
        texts = {path: file.data for path, file in self.mutants.source.files.items()}
        self.edits, self.queue = edits, EditQueue(
            edits.near, start.wrong, self.hints.lines, self.hints.causes, edits.far, beside, around, texts,
            self.hints.named, edits.reading(self.hints.named.words),
        )  # fmt: skip
        for batch in self.queue.batches(_BATCH if start.seconds < _SLOW else _BATCH // 4):
            right: list[tuple[Edit, EditOutcome]] = []
            for edit, outcome in self._tried(batch):
                mends = outcome.state == "wrong" and _is_better(outcome, start)
                self.queue.learn(edit, outcome if self.start is None else _since(self.start, outcome), mends)
                self.better += [(outcome, edit)] if mends else []
                right += [(edit, outcome)] if outcome.state == "right" else []
            self._judge(right)
            whole = any(len(outcome.wrong) < len(start.wrong) for outcome, _ in self.better)
            share = _WHOLE if whole else _SECOND
            if self.better and self.clock.left <= self.clock.seconds * share or self._over:
                break

    @property
    def _over(self) -> bool:
        """The time is up, or a patch is there and the time for its equals is up."""
        found = self.survivors.found_at
        equals = found is not None and time.monotonic() - found > _EQUALS * self.clock.seconds
        return self.clock.left <= 0 or equals or self.survivors.full

    def _judge(self, right: Sequence[tuple[Edit, EditOutcome]]) -> None:
        for edit, outcome in sorted(right, key=lambda r: (len(r[1].stages), r[0].cost, r[0].size)):
            if self.survivors.full or self.survivors.best is not None and self.clock.left <= 0:
                return
            self.survivors.judge(edit, self.clock.left, outcome.stages)

    def _tried(self, edits: Sequence[Edit]) -> Iterator[tuple[Edit, EditOutcome]]:
        for edit, outcome in self.mutants.tried(edits):
            self.search.tried += 1
            if self.search.tried % 20 == 0:
                self.progress(f"patch: {self.search.tried} edits")
            yield edit, outcome
            if self._over:
                return


def _is_better(outcome: EditOutcome, original: EditOutcome) -> bool:
    if outcome.problem != original.problem:
        return outcome.problem > original.problem
    wrong, before = set(outcome.wrong), set(original.wrong)
    return wrong < before or wrong == before and outcome.share <= _PART * original.share


def _since(start: EditOutcome, outcome: EditOutcome) -> EditOutcome:
    """What an edit changed that was made after another one; an outcome itself compares with the files as they are."""
    moved = (outcome.state, outcome.wrong, outcome.share) != (start.state, start.wrong, start.share)
    changed = tuple(n for n in outcome.changed if n in start.wrong or n in outcome.wrong)
    return replace(outcome, moved=moved, changed=changed if moved else ())


def _mend_rest(hunt: _Hunt) -> None:
    """A second edit after those that leave the fewest results wrong; the same again elsewhere comes earlier.

    Edits of several places may mend the same part of this case, and not of others: each gets half of the time left.
    """
    ordered = sorted(hunt.better, key=lambda b: (len(b[0].wrong), b[0].share, len(b[1].spans), b[1].cost))
    least = len(ordered[0][0].wrong), ordered[0][0].share
    equal = [(outcome, edit) for outcome, edit in ordered if (len(outcome.wrong), outcome.share) == least]
    firsts = list({place(edit): (outcome, edit) for outcome, edit in reversed(equal)}.values())[::-1][:_FIRSTS]
    for outcome, edit in firsts:
        seconds = hunt.clock.left if edit is firsts[-1][1] else hunt.clock.left / 2
        hints = replace(hunt.hints, lines=(), causes={edit.kind})
        if hunt.survivors.best is None and seconds > 0:
            _second(hunt, hunt.mutants, edit, outcome, hints, seconds)


def _mend_layouts(hunt: _Hunt, source: CandidateSource, problems: Sequence[Problem], on_cuda: bool) -> None:
    """A second edit for the smallest survivor that is right on every case, but not with other layouts of the inputs."""
    survivors = hunt.survivors
    edit = survivors.with_layouts[0].edit
    try:
        more = [*problems, *with_layouts(survivors.examination)]
        with Mutants(source, more, on_cuda=on_cuda, processes=_PROCESSES) as mutants:
            outcome = next(iter(mutants.tried([edit])))[1]
            if outcome.state == "wrong" and outcome.problem >= len(problems):
                seconds = max(4.0, _LAYOUTS * hunt.clock.seconds, hunt.clock.left)
                hints = Hints((), inverse_kinds(("layout_assumption",)))
                _second(hunt, mutants, edit, outcome, hints, seconds)
    except (GoldenError, NoSource):
        return


def _second(hunt: _Hunt, mutants: Mutants, edit: Edit, outcome: EditOutcome, hints: Hints, seconds: float) -> None:
    """Looks for an edit that mends the rest after `edit`, which has this outcome."""
    if hunt.edits is None or hunt.queue is None:
        return
    clock = _Deadline(time.monotonic() + seconds, seconds)
    own = hunt.survivors.none()
    second = _Hunt(hunt.search, mutants, own, clock, hints, hunt.progress, outcome)
    second.run(FurtherEdits(hunt.edits, hunt.queue.known, edit))
    hunt.survivors.adopt(own)
