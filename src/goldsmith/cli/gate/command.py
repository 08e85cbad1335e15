"""`goldsmith gate`: reads candidates as text, hands them to judges, shows verdicts and writes them as they come."""

from __future__ import annotations

import secrets
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ...assay.gate import verdict_page
from ...assay.gate.bad_problem import BadProblem
from ...assay.gate.candidate_call import DTYPES
from ...assay.gate.formats.candidate_source import NoCandidates, load_candidates
from ...assay.gate.formats.problem_folder import UnknownProblem, problem_folder
from ...assay.gate.formats.problem_source import ProblemSource, existing, known_format
from ...assay.gate.formats.submission import Submission
from ...assay.gate.isolation.limits import Limits
from ...assay.gate.judges import Judges, NoJudge, Pair
from ...assay.gate.judging import GateOptions
from ...assay.gate.verdict import REFUSED, Verdict
from ...core.tracing import TargetError
from ..bench.session import device_name
from ..output_files import check_files, write_or_explain
from ..signals import terminate_like_ctrl_c
from ..terminal import INTERRUPTED, Failure, console, count, print_paragraph
from . import display
from .verdict_output import VerdictOutput, verdict_output

ELEMENTS_ON_A_GPU = 1 << 20
WITHOUT = ("problem", "judge", "reference_fault")  # reasons that say nothing about a candidate


@dataclass(frozen=True)
class GateRequest:
    """The command-line options of one run."""

    candidates: tuple[Path, ...]
    problem: str | None = None
    device: str | None = None
    dtypes: tuple[str, ...] = ()
    sizes: str = "auto"
    elements: int | None = None
    workloads: Path | None = None
    jobs: int | None = None
    cluster: str | None = None
    probes: str = "default"
    seed: int | None = None
    resume: bool = True
    diagnose: bool = False
    bench: bool = False
    seconds: float = 60.0
    import_seconds: float = 60.0
    total_seconds: float = 300.0
    problem_seconds: float = 300.0
    memory: float = 4.0
    sandbox: str = "auto"
    verbose: bool = False


def run(request: GateRequest, *, json_to: str | None = None, html: Path | None = None) -> int:
    """Run the command and return its exit status."""
    err = console(stderr=True)
    out = err if json_to == "-" else console()
    rows = Path(json_to) if json_to not in (None, "-") else None
    check_files(html, rows)
    for option, path in (("--html", html), ("--json", rows)):
        _check_kept(option, path, request)
    began = time.monotonic()
    device = device_name(request.device)
    _check_problem(request)
    submissions = _submissions(request)
    pairs = [_pair(s, request, device) for s in submissions]
    _check_formats(request, pairs)
    options = _options(request, device)
    verdicts: list[Verdict] = []
    interrupted, failed, ways = False, "", dict[str, str]()
    asked = replace(options, seed=request.seed)
    with (
        verdict_output(json_to, pairs, asked, err, resume=request.resume) as output,
        display.GateProgress(err, len(submissions)) as progress,
    ):
        try:
            with terminate_like_ctrl_c():
                for verdict in _verdicts(pairs, options, request, output, progress, ways):
                    verdicts.append(verdict)
                    output.following(verdict)
                    progress.finished(verdict)
        except KeyboardInterrupt:
            interrupted = True
        except NoJudge as error:
            failed = f"No judge could be started: {error}."
        except BrokenPipeError:
            left = count(len(submissions) - len(verdicts), "candidate")
            failed = f"The reader of --json {json_to} has gone: {left} not judged."
    if failed and not verdicts:
        raise Failure(failed)
    cannot = [v for v in verdicts if v.status == REFUSED and v.reason in WITHOUT]
    if cannot and len(cannot) == len(verdicts):
        fault = "The golden is at fault: " if cannot[0].reason == "reference_fault" else ""
        raise Failure(f"{fault}{cannot[0].evidence[0]}")
    display.show(out, verdicts, every=request.verbose)
    how = [f"{count(len(output.kept), 'verdict')} kept from {json_to}"] if output.kept else []
    how += filter(None, [ways.get("isolation")])
    lines = _conditions(device, options, how, time.monotonic() - began)
    lost = []
    if html is not None:
        lost = write_or_explain(html, partial(verdict_page.write, verdicts, html, conditions=lines))
        if not lost:
            out.print(f"Report: {html}", soft_wrap=True, markup=False)
    out.print(display.conclusion(verdicts, len(submissions), lines))
    for sentence in [*lost, *([failed] if failed else [])]:
        print_paragraph(sentence)
    if interrupted:
        again = " The same command judges only the rest." if output.resumes and request.resume else ""
        if output.resumes and not request.resume:
            again = f" Without --resume never, the same command keeps what {json_to} holds, and judges the rest."
        missing = len(submissions) - len(verdicts)
        left = f"{count(missing, 'candidate')} {'has' if missing == 1 else 'have'}"
        print_paragraph(f"Interrupted: {left} no verdict.{again}")
        return INTERRUPTED
    if cannot:
        reasons = ", ".join(dict.fromkeys(v.reason for v in cannot))
        print_paragraph(
            f"Exit status 2: {count(len(cannot), 'candidate')} could not be judged, for a reason that is not the "
            f"candidate's ({reasons})."
        )
    if failed or cannot:
        return 2
    return 0 if all(v.ok for v in verdicts) else 1


def _check_kept(option: str, output: Path | None, request: GateRequest) -> None:
    """Raise Failure where an output would replace a candidate or a problem."""
    if output is None or not output.exists():
        return
    for place in (*request.candidates, *([Path(request.problem)] if request.problem else [])):
        inside = place.is_dir() and output.suffix == ".py" and place.resolve() in output.resolve().parents
        if inside or place.exists() and place.samefile(output):
            raise Failure(f"{option} {output} would replace what is judged: give another file.")


def _check_problem(request: GateRequest) -> None:
    """Raise Failure where the problem's path has nothing to read."""
    if request.problem is None:
        return
    folder = Path(request.problem)
    if folder.is_dir():
        if not problem_folder(folder).files:
            raise Failure(f"{folder}: the folder holds no problems; their file names end in .py or .json.")
        return
    try:
        existing(request.problem)
    except BadProblem as error:
        raise Failure(f"{error}.") from None


def _submissions(request: GateRequest) -> list[Submission]:
    try:
        return load_candidates(request.candidates)
    except NoCandidates as error:
        raise Failure(f"{error}.") from None


def _options(request: GateRequest, device: str) -> GateOptions:
    limits = Limits(
        request.seconds, request.import_seconds, int(request.memory * 2**30), total_seconds=request.total_seconds
    )
    seed = secrets.randbits(31) if request.seed is None else request.seed
    options = GateOptions(
        device, limits, seed, request.probes, request.diagnose, time=request.bench, sandbox=request.sandbox,
        problem_seconds=request.problem_seconds,
    )  # fmt: skip
    try:
        options.check()
    except TargetError as error:
        raise Failure(f"{error}.") from None
    return options


def _pair(submission: Submission, request: GateRequest, device: str) -> Pair | Verdict:
    """The problem and the candidate, or the verdict on a candidate that no judge need see."""
    candidate = submission.candidate
    if submission.verdict is not None:
        return submission.verdict
    try:
        where = _where(submission, request)
    except UnknownProblem as error:
        return Verdict(REFUSED, "unknown_problem", candidate.name, evidence=[str(error)])
    return ProblemSource(where, _problem_options(where, request, device)), candidate


def _where(submission: Submission, request: GateRequest) -> str:
    if request.problem is None:
        if not submission.candidate.path:
            raise UnknownProblem(f"{submission.candidate.name}: give its problem with --problem")
        return submission.candidate.path
    folder = Path(request.problem)
    return problem_folder(folder).named(submission.problem) if folder.is_dir() else request.problem


def _problem_options(where: str, request: GateRequest, device: str) -> dict[str, object]:
    kind = known_format(where)
    if kind == "flashinfer":
        return {} if request.workloads is None else {"workloads": str(request.workloads)}
    if kind != "kernelbench":
        return {}
    options: dict[str, object] = {"sizes": request.sizes}
    if request.elements is not None or device.startswith("cuda"):
        options["elements"] = request.elements or ELEMENTS_ON_A_GPU
    if request.dtypes:
        options["dtypes"] = tuple(DTYPES[name] for name in request.dtypes)
    return options


def _check_formats(request: GateRequest, pairs: Sequence[Pair | Verdict]) -> None:
    """Raise Failure for a dtype that does not exist, and for an option of a format that no problem has."""
    unknown = [name for name in request.dtypes if name not in DTYPES]
    if unknown:
        raise Failure(f"--dtype {unknown[0]}: not a dtype; use one of {', '.join(DTYPES)}.")
    formats = {known_format(pair[0].where) for pair in pairs if not isinstance(pair, Verdict)}
    given = {
        "--dtype": ("KernelBench", bool(request.dtypes)),
        "--sizes": ("KernelBench", request.sizes != "auto"),
        "--elements": ("KernelBench", request.elements is not None),
        "--workloads": ("FlashInfer-Bench", request.workloads is not None),
    }
    for option, (name, is_given) in given.items():
        if is_given and formats and name.split("-")[0].lower() not in formats:
            raise Failure(f"{option} is for problems of {name}, and none of these is one. Leave the option out.")


def _verdicts(
    pairs: Sequence[Pair | Verdict], options: GateOptions, request: GateRequest, output: VerdictOutput,
    progress: display.GateProgress, ways: dict[str, str],
) -> Iterator[Verdict]:  # fmt: skip
    """Verdicts in the order of the candidates, each as soon as it and all before it are there."""
    waiting = dict(output.kept)
    for verdict in waiting.values():
        progress.judged(verdict)
    following = 0
    for number, verdict in _judged(pairs, options, request, output.kept, ways):
        waiting[number] = replace(verdict, seed=options.seed or 0)
        output.finished(number, waiting[number])
        progress.judged(verdict)
        while following in waiting:
            yield waiting.pop(following)
            following += 1
    while following in waiting:
        yield waiting.pop(following)
        following += 1


def _judged(
    pairs: Sequence[Pair | Verdict], options: GateOptions, request: GateRequest, kept: Container[int],
    ways: dict[str, str],
) -> Iterator[tuple[int, Verdict]]:  # fmt: skip
    """(number, verdict) of the candidates whose verdicts are not kept, as they are finished."""
    work = list[tuple[int, Pair]]()
    for number, pair in enumerate(pairs):
        if isinstance(pair, Verdict):
            yield number, pair
        elif number not in kept:
            work.append((number, pair))
    if not work:
        return
    open_pairs = [pair for _, pair in work]
    if request.cluster is not None:
        from . import cluster

        ways["isolation"] = f"judged on the Ray cluster {request.cluster}"
        verdicts = cluster.run(open_pairs, options, request.cluster, jobs=request.jobs)
        yield from ((work[k][0], verdict) for k, verdict in verdicts)
        return
    with Judges(min(request.jobs or 0, len(work)), options) as judges:
        for k, verdict in judges.run(open_pairs):
            ways["isolation"] = judges.isolation
            yield work[k][0], verdict


def _conditions(device: str, options: GateOptions, how: Sequence[str], seconds: float) -> list[str]:
    from ...core.device import machine

    here = machine()
    name = here.gpus[0]["name"] if device.startswith("cuda") and here.gpus else f"{here.cpu}, {here.cores} cores"
    return [name, f"torch {torch.__version__}", f"seed {options.seed}", *how, f"took {display.duration(seconds)}"]
