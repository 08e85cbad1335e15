"""`diagnose`: finds the first wrong stage of a target and ranks the causes that fit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from .. import probes as catalogue
from ..checks import INTERRUPTED, NARROW
from ..declare.arguments import check_arguments, check_folder
from ..declare.case import Case
from ..declare.explained_arguments import explained_options
from ..declare.target import Target
from ..execute import hooks
from ..execute.torch_state import neutral_state
from ..judge.examination import Examination
from ..report.results import FAIL, PASS, REFERENCE_FAULT, ErrorMap, _plain
from ..support.candidate_state import CandidateState
from . import crash_safety
from .causes.likelihood import SURE
from .causes.patched import with_patch
from .causes.rank import rank, strength
from .clock import COLLECTING, SPENT, Clock
from .collect import Depth, begin, collect, described
from .experiments.extra_calls import fresh_start
from .experiments.other_cases import find_sure_case, joined
from .facts.evidence import NO_TIME, Evidence, RunFact
from .failing_case import find_failing, informative, prefer_failing_draw, prefer_numbers
from .report import bundle
from .report.rendering import PAGE, Diagnosis
from .report.sentences import open_questions, trace_sentences
from .request import Request
from .shrink.smallest_case import smallest_case
from .trace.line_search import add_line

__all__ = ["PAGE", "Diagnosis", "diagnose"]

_REPEATS = 10
_SHORT = "the budget of {:g} s was too short for all of it"
_SMALLER = 7.0  # seconds, at least, to make the case small; the time of everything before, if that was longer
_REFUSED = 5  # sentences about proposals that were not accepted
_AFTER = {  # what an interrupt leaves out, by the step that it interrupts
    "check": "the rest of the check, and all evidence for causes",
    "evidence": "further evidence, and a smaller case",
    "smaller": "a smaller case",
    "wider": "the same case with float32 inputs, and what other cases show",
    "beside": "what other cases show",
    "patch": "the search for a patch",
}
_PATCHING = 0.5  # share of the budget that is kept for the search for a patch
_SURE = 0.75  # strength of the best match below which a 16-bit case is also examined in float32


@neutral_state()
@explained_options
def diagnose(
    target: Target,
    case: Case | str | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    seed: int | None = None,
    probes: str | Sequence[str] = "all",
    budget_s: float | None = 60.0,
    out: str | os.PathLike | None = None,
    patch: bool = False,
    propose: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Find the first wrong stage of a target and rank the causes that fit. Never raises for a wrong kernel.

    case      a Case, its name, or None: tries cases until one fails, those with a size of 0 or 1 last
    dtype     dtype of the inputs; None: each of the target's dtypes
    probes    as in `check`; the cheap ones run first, the others only if those find nothing
    budget_s  seconds in all, of which at most half are for finding a failing case; None: no limit
    out       a folder for the bundle of the smallest failing case, with a page; None: writes nothing. If the disk is
              full, the diagnosis says so
    patch     also look for an edit of the candidate's source that makes it pass, for 50 to 70 % of the budget
    propose   a command that gets evidence and source as JSON on its standard input, and returns patches; with `patch`
    progress  called with a sentence while a patch is looked for

    Returns a Diagnosis, partial after a keyboard interrupt. Raises TargetError for a mistake in the declaration.
    """
    seed = hooks.seed_of(seed)
    check_arguments("diagnose", target, case, dtype, device, seed, probes, budget_s)
    if out is not None:
        check_folder("out", out)
    selected = catalogue.select(probes if isinstance(probes, str) else tuple(probes))
    cases = informative(list(target.cases)) if case is None else [target.case(case)]
    clock = Clock(budget_s, kept=_PATCHING if patch else 0.0)
    asked, target = target, crash_safety.surviving(target)
    request, state = Request(target, cases, dtype, device, seed, selected, clock), CandidateState(target)
    report, failing, later = find_failing(request, state)
    diagnosis = Diagnosis(report.verdict, report, partial=report.partial)
    crash_safety.failed(target)
    if failing is not None and not state.changed:
        target = crash_safety.in_own_process(target, failing, budget_s)
        request, state = replace(request, target=target), CandidateState(target)
    if failing is not None and not report.partial:
        failing, report = prefer_numbers(request, failing, report)
        failing, report = prefer_failing_draw(request, failing, report, state)
        diagnosis = Diagnosis(report.verdict, report, partial=report.partial)
    if failing is not None:
        try:
            if failing.case.name != cases[0].name and state.changed and not clock.lacks(
                "a run without state from other cases", COLLECTING, failing.seconds.get("values", 0.0)
            ):  # fmt: skip
                later |= fresh_start(failing, state)
            _explain(diagnosis, failing, later, clock)
            clock.stage = "wider"
            diagnosis = _in_float32(diagnosis, request, failing) or diagnosis
            clock.stage = "beside"
            add_line(diagnosis, target, failing, clock)
            _use_other_case(diagnosis, request, failing)
            if patch:
                clock.stage, clock.kept = "patch", 0.0
                _find_patch(diagnosis, request, failing, propose, progress)
        except KeyboardInterrupt:
            diagnosis.partial = INTERRUPTED
    left_out = dict.fromkeys([n.left_out for n in report.notes if n.id == "budget"] + clock.left_out)
    hurried = diagnosis.evidence is not None and NO_TIME in diagnosis.evidence.left_out.values()
    if diagnosis.partial == INTERRUPTED:
        left_out[_AFTER[clock.stage]] = None
    elif left_out or hurried:
        diagnosis.partial = (SPENT if clock.spent() else _SHORT).format(budget_s)
    diagnosis.traced += [f"Left out: {what}." for what in left_out]
    diagnosis.traced += crash_safety.crashes(target)
    if asked.runner is None:
        crash_safety.close(target)
    diagnosis.target = asked
    diagnosis.seconds = time.perf_counter() - clock.started
    if out is not None and diagnosis.write_bundle is not None:
        try:
            diagnosis.save(out)
        except OSError as error:  # a full disk: the diagnosis itself is still there
            diagnosis.traced.append(f"The bundle could not be written into {out}: {error.strerror or error}.")
    return diagnosis


def _explain(diagnosis: Diagnosis, examination: Examination, later: dict[str, RunFact], clock: Clock) -> None:
    """Fill in evidence, causes and the smallest case, each as soon as it is known, so that an interrupt keeps them."""
    diagnosis.case = diagnosis.examined = described(examination)
    evidence = diagnosis.evidence = begin(examination, diagnosis.report)
    evidence.runs.update(later)
    diagnosis.write_bundle = _writer(examination)
    clock.stage = "evidence"
    try:
        if not diagnosis.partial:
            depth = Depth(_REPEATS, sent=True)
            table = collect(examination, evidence, depth, spent=lambda more: clock.spent(COLLECTING, more))
            diagnosis.suspects = table.suspects
    finally:
        diagnosis.stages, diagnosis.location, diagnosis.map = evidence.stages, evidence.location, _map(evidence)
        diagnosis.traced = trace_sentences(evidence)
        diagnosis.undecided = open_questions(evidence, diagnosis.suspects)
        diagnosis.causes = rank(evidence) if diagnosis.verdict in (FAIL, REFERENCE_FAULT) else []
        diagnosis.first_wrong_stage = None if diagnosis.verdict == REFERENCE_FAULT else evidence.first_wrong
    clock.stage = "smaller"
    if diagnosis.verdict == FAIL and not diagnosis.partial and not clock.lacks("a smaller case"):
        _make_small(diagnosis, examination, clock)


def _in_float32(diagnosis: Diagnosis, request: Request, examination: Examination) -> Diagnosis | None:
    """Run the same case with float32 inputs. Returns the diagnosis of that case if 16-bit rounding hides the cause."""
    if diagnosis.verdict != FAIL or examination.dtype not in NARROW or examination.case.given or diagnosis.partial:
        return None
    if request.clock.lacks("the same case with float32 inputs", more=diagnosis.report.seconds):
        return None
    best = strength(diagnosis.evidence) if diagnosis.causes else 0.0
    probes = request.selected if best < _SURE else request.quick
    report, examinations = request.check([examination.case], torch.float32, probes=probes)
    raised = bool(examinations) and examinations[0].first.error is not None
    diagnosis.float32 = "raises" if raised else {FAIL: "fails", PASS: "passes"}.get(report.verdict, "")
    if report.verdict != FAIL or not examinations or raised or best >= _SURE:
        return None
    wide = Diagnosis(report.verdict, report, float32=diagnosis.float32)
    _explain(wide, examinations[0], {}, request.clock)
    if not wide.causes or strength(wide.evidence) <= best:
        return None
    narrow = str(examination.dtype).removeprefix("torch.")
    wide.traced.insert(0, f"Examined with float32 inputs: it fails in {narrow}, too, but rounding hides the cause.")
    return wide


def _use_other_case(diagnosis: Diagnosis, request: Request, examination: Examination) -> None:
    """If no rule is sure in this case, use another case in which one is."""
    evidence = diagnosis.evidence
    if diagnosis.verdict != FAIL or diagnosis.partial or evidence is None or evidence.error or not diagnosis.causes:
        return
    if strength(evidence) >= SURE or evidence.first_wrong is None:
        return
    sure_case = find_sure_case(request, examination, evidence, diagnosis.causes[0].score)
    if sure_case is not None:
        case, causes = sure_case
        diagnosis.causes = joined(diagnosis.causes, causes, case)
        diagnosis.traced.append(f"No rule is sure in this case; in {case.name}, which fails at the same stage, one is.")


def _find_patch(
    diagnosis: Diagnosis, request: Request, failing: Examination, propose: str | None, progress: Callable[[str], None]
) -> None:
    target, clock = request.target, request.clock
    if diagnosis.verdict != FAIL or diagnosis.partial or clock.lacks("the search for a patch", COLLECTING):
        return
    from .source.search import find_patch, patch_seconds  # loads what starts child processes

    seconds = patch_seconds(clock.seconds, time.perf_counter() - clock.started)
    examinations = [clock.smallest or failing, failing]
    causes = [c.id for c in diagnosis.causes[:2]]
    evidence = (
        {"target": target.name, "wrong": sorted(failing.bad), "diagnosis": diagnosis.to_json()} if propose else {}
    )
    whatifs = [] if diagnosis.evidence is None else diagnosis.evidence.whatif
    search = find_patch(
        target, examinations, seconds, line=diagnosis.line, causes=causes, whatifs=whatifs, progress=progress,
        propose=propose, evidence=evidence,
    )  # fmt: skip
    diagnosis.patch = search.patch
    if search.patch is not None:
        diagnosis.causes = with_patch(diagnosis.causes, search.patch, diagnosis.first_wrong_stage or "")
    diagnosis.traced += [search.reason] if search.reason else []
    diagnosis.traced += [f"Not accepted: {text}." for text in search.refused[:_REFUSED]]
    if search.interrupted:
        raise KeyboardInterrupt


def _map(evidence: Evidence) -> ErrorMap | None:
    """The map of the first wrong tensor, or of the other run in which it is wrong."""
    others = (m for m in evidence.report.maps.values() if m.bad and m.tensor == evidence.tensor)
    return evidence.map if evidence.map is not None else next(others, None)


def _make_small(diagnosis: Diagnosis, examination: Examination, clock: Clock) -> None:
    if diagnosis.evidence is None or not diagnosis.causes:
        return
    began = time.perf_counter()
    limit = max(_SMALLER, began - clock.started)
    shrunk, small = smallest_case(
        examination, diagnosis.evidence, diagnosis.first_wrong_stage,
        lambda more: clock.lacks("even smaller cases", more=more) or time.perf_counter() - began + more > limit,
    )  # fmt: skip
    clock.smallest = small
    diagnosis.case = described(small) | {"steps": list(shrunk.steps), "runs": shrunk.runs, "partial": shrunk.partial}
    diagnosis.write_bundle = _writer(small)


def _writer(examination: Examination) -> Callable[[Diagnosis, Path], Path]:
    def write(diagnosis: Diagnosis, folder: Path) -> Path:
        first, ref = examination._first, examination._ref
        outputs = {} if first is None else {n: t for n, _, t in first.results() if t is not None}
        golden = {} if ref is None else dict(ref.values)
        return bundle.save(
            folder, examination.material, examination.dtype, golden=golden, outputs=outputs, verdict=diagnosis.verdict,
            stage=diagnosis.first_wrong_stage, causes=[_plain(asdict(c)) for c in diagnosis.causes],
        )  # fmt: skip

    return write
