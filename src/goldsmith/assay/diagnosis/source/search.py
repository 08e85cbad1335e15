"""Searches for a patch: edits by cost, tried on the failing cases; what survives faces every case and every probe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ...declare.target import Target
from ...golden.golden_error import GoldenError
from ...golden.golden_results import GoldenResults
from ...judge.examination import Examination
from .acceptance import Acceptance
from .children.mutants import EditOutcome, Mutants
from .edits.edit_queue import EditQueue
from .edits.edits import Edit, Function, cheapest_first
from .edits.scope_edits import scope_edits
from .edits.small_edits import small_edits
from .patch import Patch, changed_line, edited_file, unified_diff
from .problems import problem, stand_in_run
from .reading.candidate_source import BACKWARD, FORWARD, CandidateSource, NoSource, Part, candidate_source
from .reading.source_file import first_line
from .reading.value_kinds import kinds_of

_SHARE, _UNBOUNDED = 0.4, 60.0  # of the budget of a diagnosis; seconds if there is none
_OTHER_PHASE = 1.5  # cost of an edit where only the right phase can see it
_BATCH = 40
_PAIRING = 0.25  # share of the time for pairs of edits, if single ones mend a part
_PAIRS, _BEAM = 150, 12
Progress = Callable[[str], None]


@dataclass
class PatchSearch:
    """How a search ended. reason: one sentence if there is no patch."""

    patch: Patch | None = None
    reason: str = ""
    tried: int = 0
    rejected: list[Edit] = field(default_factory=list)


def patch_seconds(budget: float | None, spent: float) -> float:
    """Seconds for a search: a share of the budget, and no more than is left of it."""
    return _UNBOUNDED if budget is None else min(_SHARE * budget, budget - spent)


def find_patch(
    target: Target,
    examinations: Sequence[Examination],
    seconds: float,
    *,
    progress: Progress = lambda text: None,
) -> PatchSearch:
    """The cheapest edit of the candidate's source that passes everything.

    examinations: failing ones of this target, the smallest first. A keyboard interrupt ends the search early.
    """
    until = time.monotonic() + seconds
    search = PatchSearch()
    try:
        source = candidate_source(target)
        problems = [p for e in dict.fromkeys(examinations) for p in [_problem(e)] if p is not None]
        if not problems:
            raise NoSource("the failing run has no numbers that an edited copy could be compared with")
        with Mutants(source, problems, on_cuda=examinations[0].material.candidate_device.type == "cuda") as mutants:
            if mutants.original.state == "right":
                raise NoSource("the failing case is right in a plain run, so that it cannot tell edits apart")
            edits = all_edits(source, mutants.original, mutants.kinds)
            acceptance = Acceptance(target, source, examinations[0], mutants.original.wrong)
            _search(search, _Trial(acceptance, source, mutants, until, seconds, progress), edits)
    except NoSource as error:
        search.reason = f"No patch was looked for: {error}."
    return search


def _problem(examination: Examination) -> dict[str, object] | None:
    first, ref, material = examination._first, examination._ref, examination.material
    if first is None:
        return None
    try:
        if ref is None or first.error is not None:
            first = stand_in_run(material)
            ref = GoldenResults(material, first)
        return problem(material, first, ref)
    except GoldenError:
        return None


def all_edits(
    source: CandidateSource, original: EditOutcome, kinds: Mapping[str, Mapping[str, str]] = MappingProxyType({})
) -> list[Edit]:
    """Every single edit, the cheapest first; those in the phase that computes right results cost more."""
    gradients = bool(original.wrong) and all(n.endswith(".grad") for n in original.wrong)
    wrong = BACKWARD if gradients and any(p.phases == {BACKWARD} for p in source.parts) else FORWARD
    functions = [_function(p, 0.0 if wrong in p.phases else _OTHER_PHASE, kinds) for p in source.parts]
    edits: list[Edit] = []
    for function in functions:
        beside = [f for f in functions if f is not function]
        edits += small_edits(function)
        edits += scope_edits(function, beside)
    return cheapest_first(edits)


def _function(part: Part, penalty: float, kinds: Mapping[str, Mapping[str, str]]) -> Function:
    name = getattr(part.node, "name", "<lambda>")
    lines = range(first_line(part.node), part.node.lineno + 1)  # type: ignore[attr-defined]
    return Function(part.file, part.node, penalty, kinds_of(kinds, part.file.path, name, lines))


@dataclass
class _Trial:
    acceptance: Acceptance
    source: CandidateSource
    mutants: Mutants
    until: float
    seconds: float
    progress: Progress

    @property
    def left(self) -> float:
        return self.until - time.monotonic()


def _search(search: PatchSearch, trial: _Trial, edits: Sequence[Edit]) -> None:
    original = trial.mutants.original
    better: list[tuple[float, Edit]] = []
    queue = EditQueue(edits)
    for batch in queue.batches(_BATCH):
        for edit, outcome in _run(search, trial, batch, len(edits)):
            mends = outcome.state == "wrong" and _is_better(outcome, original)
            queue.learn(edit, outcome, mends)
            if mends:
                better.append((outcome.share, edit))
            if outcome.state == "right" and _accepted(search, trial, edit):
                return
        if better and trial.left <= trial.seconds * _PAIRING or trial.left <= 0:
            break
    pairs = _pairs(sorted(better, key=lambda b: b[0]), edits)
    for edit, outcome in _run(search, trial, pairs, len(pairs)) if trial.left > 0 else ():
        if outcome.state == "right" and _accepted(search, trial, edit):
            return
    search.reason = f"No patch: {search.tried} edits of the candidate's source were tried, and none of them passes."


def _run(search: PatchSearch, trial: _Trial, edits: Sequence[Edit], count: int) -> Iterator[tuple[Edit, EditOutcome]]:
    for edit, outcome in trial.mutants.tried(edits):
        search.tried += 1
        if search.tried % 20 == 0:
            trial.progress(f"patch: {search.tried} of {count} edits")
        yield edit, outcome
        if trial.left <= 0:
            return


def _is_better(outcome: EditOutcome, original: EditOutcome) -> bool:
    return outcome.problem > original.problem or set(outcome.wrong) < set(original.wrong)


def _pairs(better: Sequence[tuple[float, Edit]], edits: Sequence[Edit]) -> list[Edit]:
    """Pairs of an edit that mends a part of the results with a cheap one."""
    return [
        first.joined(second)
        for _, first in better[:_BEAM]
        for second in edits[:_PAIRS]
        if first.path == second.path and not first.overlaps(second)
    ]


def _accepted(search: PatchSearch, trial: _Trial, edit: Edit) -> bool:
    """Whether the edited candidate passes every case; then it becomes the patch."""
    path, text = edited_file(trial.mutants.texts(edit))
    before = trial.source.files[path].data.decode(errors="replace")
    trial.progress("patch: all cases with an edit that mends this one")
    accepted = trial.acceptance.of({path: text}, max(2.0, trial.left))
    if accepted is None:
        search.rejected.append(edit)
        return False
    search.patch = Patch(
        path, changed_line(before, text), edit.kind, unified_diff(path, before, text), accepted.cases,
        accepted.remaining, search.tried, text,
    )  # fmt: skip
    return True
