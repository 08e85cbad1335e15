"""judge: one candidate against one problem, in isolation; the verdict says what decided.

The judge holds the golden and the expected results; the candidate runs in a process of its own, which gets inputs and
returns tensors by value.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from ...core.tracing import TargetError
from .. import probes as catalogue
from ..checks import examine
from ..declare.arguments import check_device, check_seed
from ..declare.binding import parameters
from ..declare.target import Target
from ..golden.golden_cache import remembering
from ..judge.examination import Examination
from ..probes import decisions
from ..report.check_report import Report
from ..report.results import FAIL, NOTHING_COMPARED, QUALITY, REFERENCE_FAULT, UNJUDGED, Finding
from .backward_offer import offers_backward
from .candidate import LOADER, Candidate
from .candidate_call import wanted_names
from .compiled import library_cache
from .compiled.sources import BUILDER, LANGUAGES
from .isolation.candidate_process import CandidateEnded, CandidateProcess
from .isolation.limits import Limits, Spent
from .isolation.loading import stand_in
from .isolation.sandbox import FULL, Surroundings
from .isolation.zygote_process import zygote
from .problem import Problem
from .timing.impossibility import Impossible
from .timing.measure import measure
from .tricks import late_writes, plain_torch, reasons, repetitions, result_dtypes, source
from .tricks.reasons import Facts
from .tricks.scalars import other_scalars
from .tricks.sizes import undeclared
from .tricks.source import SourceFacts
from .verdict import ACCEPTED, CHEATING, CRASHED, REFUSED, WRONG, Verdict
from .weight_matching import UNPLACED

_SENTENCES = 8  # of evidence
SANDBOXES = ("auto", "namespaces")


@dataclass(frozen=True)
class GateOptions:
    """How candidates are judged.

    seed      None draws one that no candidate can know
    diagnose  also say what is likely wrong with a wrong one, which takes some seconds
    time      also time accepted ones
    sandbox   of the judges that `Judges` starts: "auto", or "namespaces" (or no judge)
    problem_seconds  for one step of a problem's own code in these judges: reading it, the inputs of a case, or one call
                     of its golden
    """

    device: str = "cpu"
    limits: Limits = field(default_factory=Limits)
    seed: int | None = None
    probes: str = "default"
    diagnose: bool = False
    threads: int = 0
    time: bool = False
    sandbox: str = "auto"
    problem_seconds: float = 300.0

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "limits": self.limits.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "limits": Limits(**data["limits"])})

    def check(self) -> None:
        """TypeError or TargetError for a value with which nothing can be judged on this machine."""
        check_device(self.device)
        if self.seed is not None:
            check_seed(self.seed)
        if not isinstance(self.limits, Limits):
            raise TypeError(f"limits: expected assay.gate.Limits, got {type(self.limits).__name__}")
        catalogue.select(self.probes)
        if self.sandbox not in SANDBOXES:
            raise TargetError(f"sandbox: {self.sandbox!r} is unknown; there are: {', '.join(SANDBOXES)}")
        seconds = self.problem_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise TypeError(f"problem_seconds: expected a positive number, got {seconds!r}")


def judge(
    candidate: Candidate,
    problem: Problem,
    *,
    device: str | torch.device = "cpu",
    limits: Limits | None = None,
    seed: int | None = None,
    probes: str = "default",
    diagnose: bool = False,
) -> Verdict:
    """The verdict on one candidate. Whatever the candidate does, this returns.

    Raises TypeError or TargetError for wrong arguments.
    """
    options = GateOptions(str(device), limits or Limits(), seed, probes, diagnose)
    return next(iter(judge_all([candidate], problem, options=options)))


def judge_all(
    candidates: Iterable[Candidate], problem: Problem, *, options: GateOptions | None = None
) -> Iterator[Verdict]:
    """The verdicts on candidates, in their order. Raises TypeError or TargetError for wrong arguments, at the call."""
    options = options or GateOptions()
    options.check()
    if not isinstance(problem, Problem):
        how = "gate.Problem.of makes one from it" if isinstance(problem, Target) else "gate.load_problem reads a file"
        raise TypeError(f"problem: expected an assay.gate.Problem, got {type(problem).__name__}; {how}")
    if isinstance(candidates, Candidate):
        raise TypeError("candidates: expected several, got one Candidate; gate.judge judges one")
    return _verdicts(candidates, problem, options)


def _verdicts(candidates: Iterable[Candidate], problem: Problem, options: GateOptions) -> Iterator[Verdict]:
    seed = secrets.randbits(31) if options.seed is None else options.seed
    for candidate in candidates:
        if not isinstance(candidate, Candidate):
            raise TypeError(
                f"candidate: expected an assay.gate.Candidate, got {type(candidate).__name__}; "
                "Candidate(name, source) makes one from a text, and Candidate.read(path) reads a file"
            )
        began, spent = time.monotonic(), Spent()
        verdict = _judge(candidate, problem, options, seed, spent)
        if verdict.ok and options.time:
            verdict = _timed(candidate, problem, options, seed, spent)
        if verdict.status == WRONG and options.diagnose:
            verdict.diagnosis = _explained(candidate, problem, options, seed, spent)
        verdict.candidate, verdict.seed, verdict.seconds = candidate.name, seed, time.monotonic() - began
        yield verdict


def _judge(candidate: Candidate, problem: Problem, options: GateOptions, seed: int, spent: Spent) -> Verdict:
    facts = source.read(candidate.source) if candidate.language == "python" else SourceFacts(kernel=True)
    if facts.judge:
        return _importing(facts.judge[0])
    process = _process(candidate, problem, options, spent)
    try:
        verdict = _examined(problem, options, seed, process, facts)
    except CandidateEnded as ended:
        verdict = Verdict(ended.status, ended.reason, evidence=[ended.text])
    except TargetError as error:
        reason = "problem" if _refuses_golden(problem, options, seed) else "declaration"
        verdict = Verdict(REFUSED, reason, evidence=[str(error)])
    finally:
        process.close()
    seen = reasons.of_events(process.seen, problem.files)
    if seen is not None:
        return replace(verdict, status=CHEATING, reason=seen[0], evidence=[seen[1], *verdict.evidence])
    if verdict.status in (WRONG, CRASHED):
        remarks = [str(what[0]) for kind, *what in process.seen if kind == "remark"]
        verdict.evidence = [*remarks, *_lacks_parameters(process, problem), *verdict.evidence]
        if UNPLACED in remarks:
            verdict.status, verdict.reason = REFUSED, "unmatched_weights"
    if verdict.reason == "missing_package":
        verdict.evidence = [_file_beside(candidate, verdict.evidence[0]) or verdict.evidence[0]]
    imported = reasons.judge_imported(process.seen)
    if imported:
        return _importing(imported)
    left = [what for kind, *what in process.seen if kind == "left"]
    if verdict.ok and left:
        return Verdict(WRONG, "settings", evidence=[f"after a call, {left[0][0]}"])
    return verdict


def _refuses_golden(problem: Problem, options: GateOptions, seed: int) -> bool:
    """Whether the problem's declaration does not fit its own golden either, in the place of a candidate."""
    target = problem.declared
    try:
        examine(target, target.cases, None, options.device, seed, catalogue.select("values"), None, until_failing=True)
    except TargetError:
        return True
    return False


def _lacks_parameters(process: CandidateProcess, problem: Problem) -> list[str]:
    """A sentence if the candidate takes nothing, though the golden does."""
    wanted = parameters(problem.golden)
    if process.parameters.get("candidate") != [] or not wanted:
        return []
    return [f"it has no parameters; the golden has {', '.join(wanted)}"]


def _file_beside(candidate: Candidate, why: str) -> str:
    """Which file or folder beside the candidate is the module that Python does not find, in a sentence, or ""."""
    name = re.search(r"No module named '(\w+)", why)
    folder = os.path.dirname(candidate.path)
    beside = [os.path.join(folder, name[1] + end) for end in (".py", "")] if name and candidate.path else []
    for file in filter(os.path.exists, beside):
        return f"it imports {file}, which lies beside it; a candidate is one file, so move that code into it"
    return ""


def _importing(module: str) -> Verdict:
    return Verdict(REFUSED, "imports_judge", evidence=[f"it imports {module}, which belongs to the judge"])


def _process(candidate: Candidate, problem: Problem, options: GateOptions, spent: Spent) -> CandidateProcess:
    gpu = options.device if torch.device(options.device).type == "cuda" else ""
    triton = bool(gpu) and "triton" in candidate.source
    around = Surroundings(hidden=_folders(problem), gpu=gpu, threads=options.threads, triton=triton)
    process = partial(CandidateProcess, zygote(), options.limits, around=around, spent=spent, ahead=True)
    library = None
    if candidate.language in LANGUAGES:
        compiling: dict[str, object] = {
            "source": candidate.source,
            "files": dict(candidate.files),
            "names": list(wanted_names(candidate.entry, problem.construct)),
            "language": candidate.language,
        }
        library = partial(library_cache.library, partial(process, BUILDER, compiling), compiling)
    return process(LOADER, candidate.loading(problem.construct), library=library)


def _target(problem: Problem, process: CandidateProcess) -> Target:
    """The problem's target, whose candidate is imported in that process."""
    functions = process.load()
    try:
        function = stand_in(functions.get("candidate"), "candidate")
    except (KeyError, TypeError, ValueError) as error:
        raise CandidateEnded(CRASHED, f"its process sent parameters of no function ({error})") from error
    return problem.target(function, process)


def _judged_target(target: Target, problem: Problem, options: GateOptions, seed: int) -> Target:
    """The problem's target, without a backward if the candidate need not have one and has none."""
    if problem.backward == "present" and not offers_backward(target, options.device, seed):
        return replace(target, backward=None)
    return target


def _timed(candidate: Candidate, problem: Problem, options: GateOptions, seed: int, spent: Spent) -> Verdict:
    """The verdict of an accepted candidate with its time, from a new process: state of earlier calls shows, too."""
    process = _process(candidate, problem, options, spent)
    process.ahead = False  # a spare that warms up would disturb the times
    try:
        target = _target(problem, process)
        timing = measure(process, target, torch.device(options.device), seed).to_json()
        seen = reasons.of_events(process.seen, problem.files)
        if seen is not None:
            return Verdict(CHEATING, seen[0], evidence=[f"when it was timed, {seen[1]}"])
        imported = reasons.judge_imported(process.seen)
        if imported:
            return _importing(imported)
        return Verdict(ACCEPTED, timing=timing)
    except Impossible as error:
        return Verdict(CHEATING, error.reason, evidence=[str(error)])
    except CandidateEnded as ended:
        return Verdict(ended.status, ended.reason, evidence=[f"when it was timed: {ended.text}"])
    except TargetError as error:
        return Verdict(ACCEPTED, evidence=[f"not timed: {error}"])
    finally:
        process.close()


def _explained(candidate: Candidate, problem: Problem, options: GateOptions, seed: int, spent: Spent) -> str:
    """What is likely wrong with a candidate, from a new process: in the judged one, calls have left their state."""
    from . import candidate_diagnosis  # it loads what no other verdict needs

    seconds = min(options.limits.seconds, candidate_diagnosis.BUDGET)
    limited = replace(options, limits=replace(options.limits, seconds=seconds))
    process = _process(candidate, problem, limited, spent)

    def target(process: CandidateProcess) -> Target:
        return _judged_target(_target(problem, process), problem, options, seed)

    return candidate_diagnosis.explained(process, target, options.device, seed)


def _examined(
    problem: Problem, options: GateOptions, seed: int, process: CandidateProcess, facts: SourceFacts
) -> Verdict:
    """The verdict of the assay: on the declared cases, then on sizes and scalars that the problem does not declare."""
    whole = _target(problem, process)
    target = _judged_target(whole, problem, options, seed)
    remarks: list[str] = []
    selected = catalogue.select(options.probes)
    quick = catalogue.select("quick")
    for beyond, cases, probes in (
        ("", target.cases, selected),
        ("sizes", undeclared(target.cases, seed), quick),
        ("scalars", other_scalars(target.cases, target.dtypes[0], seed), quick),
    ):
        with remembering(problem.known):
            report, failing = examine(target, cases, None, options.device, seed, probes, None, until_failing=True)
        remarks += [n.text for n in report.notes if n.id == decisions.UNDETERMINED]
        if not beyond or report.verdict == FAIL and not _refuses(failing):
            verdict = _verdict(report, failing, process, beyond)
            if not verdict.ok:
                return verdict
        other = result_dtypes.evidence(target, cases, report, process, options.device, seed)
        if other:
            return Verdict(WRONG, "dtype", evidence=[other])
    if problem.wants_kernel:
        why = (
            "its source holds no kernel"
            if not facts.kernel
            else plain_torch.evidence(process, target, options.device, seed)
        )
        if why:
            return Verdict(CHEATING, "plain_torch", evidence=[f"{why}, and the problem asks for a kernel"])
    if target.backward is None and whole.backward is not None and offers_backward(whole, options.device, seed):
        return Verdict(CHEATING, "call_count", evidence=["it has a backward now, and had none in its first call"])
    late = late_writes.evidence(process)[:_SENTENCES]
    return Verdict(CHEATING, "late_write", evidence=late) if late else Verdict(ACCEPTED, evidence=remarks[:_SENTENCES])


def _refuses(failing: Sequence[Examination]) -> bool:
    """Whether the candidate raises on a size that the problem does not declare, which it may."""
    return any(e._first is not None and e.first.error is not None for e in failing)


def _folders(problem: Problem) -> tuple[str, ...]:
    """The folders that describe the problem, which candidates may not see."""
    return tuple(dict.fromkeys(str(Path(file).resolve().parent) for file in problem.files))


def _verdict(report: Report, failing: Sequence[Examination], process: CandidateProcess, beyond: str = "") -> Verdict:
    """The verdict that a report amounts to; `beyond`: what its cases have that is not declared."""
    if report.verdict == REFERENCE_FAULT:
        texts = [f.text for f in report.findings if f.probe == "golden"]
        return Verdict(REFUSED, "reference_fault", evidence=texts)
    if report.verdict == UNJUDGED:
        reason = "problem" if any(n.text == NOTHING_COMPARED for n in report.notes) else "unjudged"
        return Verdict(REFUSED, reason, evidence=[n.text for n in report.notes][:_SENTENCES])
    findings = [f for f in report.findings if f.rung != QUALITY]
    if report.verdict != FAIL or not findings:
        return Verdict(ACCEPTED)
    texts = [f.text for f in findings][:_SENTENCES]
    examination = failing[0] if failing else None
    known = _facts(examination, process)
    trick: tuple[str, str] | None = None
    if not beyond:
        trick = reasons.trick_of(findings, known)
        if examination is not None and known.first is not None and (trick is None or trick[0] in reasons.WEAK):
            trick = _shown_by_repetition(examination, findings, process) or trick
    elif beyond == "sizes":
        text = f"right for the declared sizes, wrong for {findings[0].case}: {findings[0].text}"
        trick = next(((f.trick, f.text) for f in findings if f.trick == "cached_result"), None)
        if trick is None and not reasons.small(findings, known):
            trick = "shape_branch", text
        texts = [text, *texts]
    else:
        text = f"right for the declared scalars, wrong for {findings[0].case}: {findings[0].text}"
        return Verdict(WRONG, beyond, case=findings[0].case, evidence=[text, *texts], finding=findings[0])
    if trick is not None:
        status, reason = CHEATING, trick[0]
        texts = list(dict.fromkeys([trick[1], *texts]))
    else:
        raised = None if examination is None or examination._first is None else examination.first.error
        if isinstance(raised, ModuleNotFoundError):  # as where the source itself imports it
            text = f"it needs a package that is not installed here: {raised}"
            return Verdict(REFUSED, "missing_package", case=findings[0].case, evidence=[text])
        status, reason = WRONG if raised is None else CRASHED, findings[0].probe
        small = "" if raised is not None else reasons.digits(findings, known)
        if small:
            reason, texts = "lowered_precision", [small, *texts]
    return Verdict(status, reason, case=findings[0].case, evidence=texts, finding=findings[0])


def _shown_by_repetition(
    examination: Examination, findings: Sequence[Finding], process: CandidateProcess
) -> tuple[str, str] | None:
    """The trick that repeated calls show; None also where one of them ends its process, because the verdict stands."""
    try:
        return repetitions.of_ones(examination, findings, process) or repetitions.of_earlier_calls(process)
    except CandidateEnded:
        return None


def _facts(examination: Examination | None, process: CandidateProcess) -> Facts:
    if examination is None or examination._first is None or examination._ref is None:
        return Facts(process.seen)
    return Facts(process.seen, examination.first, examination.material, examination.ref.values)


def isolation() -> str:
    """What isolates candidates on this machine, in a sentence."""
    how = zygote().isolation
    if how == FULL:
        return "candidates run in namespaces: no network, no other process, a read-only file system, an empty home"
    return f"candidates run in process groups only, because this system makes no namespaces ({how})"
