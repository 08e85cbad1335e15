"""`check`: runs every case of a target, in every dtype, through every probe; raises with the report when one fails."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace

import torch

from ..core.tracing import TargetError
from . import probes as catalogue
from .declare.arguments import check_arguments
from .declare.case import Case
from .declare.explained_arguments import explained_options
from .declare.target import Target
from .execute import hooks
from .execute.records import RunSettings
from .execute.torch_state import neutral_state
from .golden.golden_error import GoldenError
from .judge.examination import Budget, Ended, Examination
from .judge.replaced_functions import unreplaced
from .probes import values
from .report.check_report import Report
from .report.environment import environment
from .report.results import (
    FAIL,
    GOLDEN_RAISED,
    NOT_JUDGED,
    NOT_RUN,
    PASS,
    QUALITY,
    REFERENCE_FAULT,
    UNJUDGED,
    AssayError,
    Finding,
    Note,
    ProbeRun,
    nothing_compared,
)
from .support import memory_errors

OWN_INPUTS = ("layouts", "scaling", "taint")  # probes that change the values of inputs, which a golden may refuse
NARROW = (torch.bfloat16, torch.float16)
INTERRUPTED = "interrupted"
NO_MEMORY = "out_of_memory"  # id of the note on a probe; in a report's environment, the last out-of-memory message


@explained_options
def check(
    target: Target,
    case: Case | str | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    seed: int | None = None,
    probes: str | Sequence[str] = "default",
    budget_s: float | None = None,
    strict: bool = False,
    raises: bool = True,
) -> Report:
    """Compare a target with its golden on every case, with the default probes.

    case      a Case, its name, or None for all of them
    dtype     the dtype of the inputs; None: each of the target's dtypes. 16-bit ones are also tried in float32
    device    where the candidate runs; the golden runs there too, in float64. On the CPU where the inputs of a case
              have at most 65,536 elements, which is faster
    seed      of inputs, output gradients and ensembles: the same seed gives the same report. None: 0, or under pytest
              one that belongs to the test
    probes    a level or a list of levels and probes: "default" is every probe, 24 candidate runs + 3 per axis;
              "quick" leaves out the costly ones (layouts, scaling, taint), some eight runs; or names such as "taint"
    budget_s  seconds after which no further probe or case starts. The report names what was skipped, and the verdict
              is "unjudged" where a case did not run and nothing was found
    strict    findings of rung QUALITY fail, too
    raises    raise AssayError when the verdict is not "pass"; otherwise only return the report

    Returns a Report. Raises AssayError (its text is the report), and TargetError for a mistake in the declaration.
    Ctrl-C raises KeyboardInterrupt, whose `.report` holds the finished part: "unjudged" unless something was found.
    A case that runs out of memory counts as not run.
    """
    seed = hooks.seed_of(seed)
    check_arguments("check", target, case, dtype, device, seed, probes, budget_s)
    if not isinstance(strict, bool):
        raise TypeError(f"strict: expected True or False, got {strict!r}")
    selected = catalogue.select(probes if isinstance(probes, str) else tuple(probes))
    cases = target.cases if case is None else (target.case(case),)
    report, _ = examine(target, cases, dtype, device, seed, selected, budget_s, strict=strict)
    for record in hooks.CHECKS:
        record(hooks.CheckRecord(target, case, dtype, device, report))
    if raises and not report.ok:
        raise AssayError(report)
    return report


def examine(
    target: Target,
    cases: Sequence[Case],
    dtype: torch.dtype | None,
    device: str | torch.device,
    seed: int,
    selected: frozenset[str],
    budget_s: float | None,
    *,
    strict: bool = False,
    until_failing: bool = False,
) -> tuple[Report, list[Examination]]:
    """The report of a check. With `until_failing`, stops at the first examination that fails and returns it as well.

    Ctrl-C also stops it then; the report holds the finished part and is marked partial.
    """
    budget = Budget(budget_s, time.perf_counter())
    report = Report(target.name or "", environment=environment(device), device=str(device), seed=seed, strict=strict)
    tally = _Tally()
    # an examination holds the tensors of every run, so only the requested one is kept
    examinations: list[Examination] = []
    stopped: KeyboardInterrupt | None = None
    with neutral_state():
        for each in cases:
            for drawn, only_values in _dtypes(target, each, dtype, selected):
                if examinations:
                    break
                label = label_of(each, drawn, target, dtype)
                why = report.partial or (budget.spent_text if budget.spent else "")
                if why:
                    _not_run(report, tally, why, label, drawn, selected, only_values, late=True)
                    continue
                try:
                    examination = Examination(target, each, drawn, device, seed, selected, label)
                except Exception as error:
                    if not memory_errors.out_of_memory(error):
                        raise
                    why = memory_errors.out_of_memory_text(error)
                    _not_run(report, tally, why, label, drawn, selected, only_values)
                    report.environment[NO_MEMORY] = why
                    continue
                try:
                    examination, tally = _judged(examination, budget, tally, only_values)
                except KeyboardInterrupt as error:
                    report.partial, stopped = INTERRUPTED, error
                    examination.note(NOT_RUN, report.target, f"the case did not finish: {INTERRUPTED}")
                _collect(report, examination)
                if not only_values:
                    tally.requested_case(examination)
                if until_failing and _verdict(report, tally) in (FAIL, REFERENCE_FAULT):
                    examinations.append(examination)
                del examination
                memory_errors.release(device)
    if len(cases) == len(target.cases):
        report.notes += nothing_compared(report)
    report.probes = tally.runs(selected)
    report.verdict = _verdict(report, tally)
    report.seconds = time.perf_counter() - budget.started
    if stopped is not None and not until_failing:
        stopped.report = report  # type: ignore[attr-defined]
        stopped.add_note(f"The check of {report.target} was interrupted; .report has the finished part.")
        raise stopped
    return report, examinations


def _spelt_all(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(map(_spelt, dtypes))


def _dtypes(
    target: Target, case: Case, dtype: torch.dtype | None, selected: frozenset[str]
) -> list[tuple[torch.dtype, bool]]:
    """(dtype, values only): the requested dtypes, and float32 beside a 16-bit one, because it shows small factors."""
    wanted = list(target.dtypes) if dtype is None else [dtype]
    if case.given:
        own = case.own_dtypes
        if dtype is not None and own and dtype not in own:
            raise TargetError(
                f"dtype: case {case.name} is a dict of tensors, which keep their own dtype ({_spelt_all(own)}), and "
                f"cannot be run in {_spelt(dtype)}; leave dtype out, or draw the tensors in an @assay.case"
            )
        declared = target.dtypes != (torch.float32,) and not set(own) & set(target.dtypes)
        if dtype is None and own and declared:
            raise TargetError(
                f"dtypes: {_spelt_all(target.dtypes)} is declared, and case {case.name} is a dict of tensors in "
                f"{_spelt_all(own)}, which keep their own dtype; give them in a declared one, or draw them in an "
                f"@assay.case"
            )
        return [(dtype or (own or wanted)[0], False)]
    narrow = any(d in NARROW for d in wanted) and torch.float32 not in wanted
    extra = [(torch.float32, True)] if narrow and "float32" in selected else []
    return [(d, False) for d in wanted] + extra


def label_of(case: Case, dtype: torch.dtype, target: Target, requested: torch.dtype | None) -> str:
    single = case.given or (len(target.dtypes) == 1 and requested in (None, dtype) and dtype == target.dtypes[0])
    return case.name if single else f"{case.name} {_spelt(dtype)}"


def _spelt(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# one case


def _judged(examination: Examination, budget: Budget, tally: _Tally, only_values: bool) -> tuple[Examination, _Tally]:
    """Runs the probes; once more on the candidate's device where the golden, judged on the CPU, raises."""
    before = deepcopy(tally)
    with budget.ends(examination), unreplaced(examination):
        _examine(examination, budget, tally, only_values)
    if examination.problems and examination.material.runs_on is not None:
        return _judged(examination.on_its_device(), budget, before, only_values)
    return examination, tally


def _examine(examination: Examination, budget: Budget, tally: _Tally, only_values: bool) -> None:
    """Run the selected probes on one case, in order, and record the cost of each."""
    if only_values:
        _float32(examination, tally)
        return
    _warm_up(examination)
    skipped: list[str] = []
    for probe in catalogue.DEFAULT:
        if probe.name not in examination.selected or probe.run is None:
            continue
        if probe.name != "values" and budget.spent:
            tally.skipped(probe.name, budget.spent_text)
            skipped.append(probe.name)
            continue
        try:
            with tally.timing(probe.name, examination):
                probe.run(examination)
        except Ended as end:
            tally.rest(examination.selected, str(end))
            return
        except GoldenError as error:
            if probe.name in OWN_INPUTS:
                text = f"{probe.name}: the golden raises on inputs of this probe ({error}); not finished on this case"
                examination.note(GOLDEN_RAISED, examination.target.name or "", text)
                continue
            examination.problems.append(f"the golden raised in probe {probe.name!r}: {error}")
            tally.rest(examination.selected, "the golden raised")
            return
        except Exception as error:
            if not memory_errors.out_of_memory(error):
                raise
            examination.short = memory_errors.out_of_memory_text(error)
            if probe.name == "values":
                examination.note(
                    NOT_RUN, examination.target.name or "", f"the case did not finish: {examination.short}"
                )
                tally.rest(examination.selected, "out of memory")
                return
            examination.note(NO_MEMORY, probe.name, f"{examination.short}; not finished on this case: {probe.name}")
        if examination.short:
            memory_errors.release(examination.device)
    if skipped:
        left_out = ", ".join(skipped)
        text = f"{budget.spent_text}; not run on this case: {left_out}"
        examination.note("budget", examination.target.name or "", text, left_out)


def _not_run(
    report: Report, tally: _Tally, why: str, label: str, dtype: torch.dtype, selected: frozenset[str],
    only_values: bool, late: bool = False,
) -> None:  # fmt: skip
    """Record a case for which no time was left (late), or no memory. float32 beside a 16-bit dtype is only a probe."""
    for name in ["float32"] if only_values else selected - {"float32"}:
        tally.skipped(name, why)
    if not only_values:
        report.cases.append(label)
        report.notes.append(Note(NOT_RUN, report.target, f"the case did not run: {why}", label, "the case" * late))
        if _spelt(dtype) not in report.dtypes:
            report.dtypes.append(_spelt(dtype))


def _float32(examination: Examination, tally: _Tally) -> None:
    """Run a 16-bit target again with float32 inputs, where a factor of 1.002 is visible. A refusal becomes a note."""
    name = examination.target.name or ""
    try:
        with tally.timing("float32", examination):
            if examination.execute("values", "float32", look=False).error is not None:
                examination.note("refused_dtype", name, "float32 inputs are refused; only the 16-bit ones were judged")
                return
            values.run(examination)
    except Ended as end:
        tally.rest(frozenset(["float32"]), str(end))
    except GoldenError as error:
        examination.problems.append(f"the golden raised with float32 inputs: {error}")
    except Exception as error:
        if not memory_errors.out_of_memory(error):
            raise
        examination.short = memory_errors.out_of_memory_text(error)
        examination.note(NO_MEMORY, "float32", f"{examination.short}; not finished on this case: float32")
    examination.findings = [replace(f, probe="float32") for f in examination.findings]


def _warm_up(examination: Examination) -> None:
    """One run in advance where kernels may be autotuned: tuning runs them many times on the same buffers."""
    if examination.material.candidate_device.type == "cuda" and "triton" in sys.modules:
        try:
            examination.execute("values", "warm-up", RunSettings(), look=False)
        except Exception as error:
            if not isinstance(error, Ended) and not memory_errors.of_a_gpu(error):
                raise  # else the first run will report the same error


class _Tally:
    """The cost of every probe, over all cases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.candidate: dict[str, int] = {}
        self.reasons: dict[str, str] = {}
        self.cases: dict[torch.dtype, list[tuple[str, bool]]] = {}  # (label, whether every input has elements)

    def requested_case(self, examination: Examination) -> None:
        """A case in a requested dtype (float32 beside a 16-bit one is not)."""
        filled = all(t.numel() for t in examination.material.inputs.values())
        self.cases.setdefault(examination.dtype, []).append((examination.label, filled))

    def judged(self, report: Report) -> bool:
        """Whether some dtype was judged. If some of its cases were refused, another one must have had elements."""
        refused = {n.case for n in report.notes if n.id == NOT_JUDGED}
        return not self.cases or any(
            not refused & {label for label, _ in cases} or any(f for label, f in cases if label not in refused)
            for cases in self.cases.values()
        )

    def timing(self, name: str, examination: Examination) -> _Timing:
        return _Timing(self, name, examination)

    def skipped(self, name: str, reason: str) -> None:
        self.reasons.setdefault(name, reason)

    def rest(self, selected: frozenset[str], reason: str) -> None:
        for name in selected:
            if name not in self.seconds:
                self.reasons.setdefault(name, reason)

    def runs(self, selected: frozenset[str]) -> list[ProbeRun]:
        rows = []
        for probe in catalogue.DEFAULT:
            name = probe.name
            looks = name in selected and probe.run is None and name != "float32"  # it checks the runs of the others
            ran = name in self.seconds or (looks and bool(self.seconds))
            reason = self.reasons.get(name, "") if name in selected else "not selected"
            if not ran and not reason:
                reason = "no 16-bit dtype alone" if name == "float32" else "nothing to do"
            rows.append(ProbeRun(name, ran, reason, round(self.seconds.get(name, 0.0), 6), self.candidate.get(name, 0)))
        return rows


class _Timing:
    def __init__(self, tally: _Tally, name: str, examination: Examination):
        self.tally, self.name, self.examination = tally, name, examination

    def __enter__(self) -> None:
        self.started, self.before = time.perf_counter(), self.examination.candidate_runs

    def __exit__(self, *exc: object) -> None:
        t, name = self.tally, self.name
        self.examination.seconds[name] = seconds = time.perf_counter() - self.started
        t.seconds[name] = t.seconds.get(name, 0.0) + seconds
        t.candidate[name] = t.candidate.get(name, 0) + self.examination.candidate_runs - self.before


# the report


def _collect(report: Report, examination: Examination) -> None:
    report.cases.append(examination.label)
    dtype = _spelt(examination.dtype)
    if dtype not in report.dtypes:
        report.dtypes.append(dtype)
    report.findings += [
        Finding("CERTAIN", "golden", "", None, None, None, p, examination.label, kind="golden")
        for p in examination.problems
    ]
    report.findings += examination.findings
    report.notes += examination.notes
    report.rows += examination.rows
    report.maps.update(examination.maps)
    for name in examination.stages:
        if name not in report.stages:
            report.stages.append(name)
    report.environment["interpreted"] += examination.interpreted
    if examination.short:
        report.environment[NO_MEMORY] = examination.short
    spent = report.environment["runs"]
    spent["candidate"] += examination.candidate_runs
    spent["calls"] += examination.plain_calls
    spent["golden"] += examination.golden_count


def _verdict(report: Report, tally: _Tally) -> str:
    if any(f.probe == "golden" for f in report.findings):
        return REFERENCE_FAULT
    failing = [f for f in report.findings if report.strict or f.rung != QUALITY]
    if failing:
        return FAIL
    left = any(n.id == NOT_RUN or n.id == NOT_JUDGED and n.left_out for n in report.notes)
    return PASS if tally.judged(report) and not left else UNJUDGED
