"""Runs of a candidate that has failed before: if its process ends, that run counts as one that raised.

So a crash, for example at a size that no case declares, ends neither the diagnosis nor its caller. A candidate that has
no process of its own yet gets one, if its source can be loaded there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import cast

from ..declare.case import Case
from ..declare.target import Target
from ..execute import hooks
from ..execute.records import CandidateRun, Material, RunSettings
from ..gate.isolation.candidate_process import CandidateEnded, CandidateProcess
from ..gate.isolation.zygote_process import NoZygote
from ..judge.examination import Examination
from ..report.results import QUALITY
from .source.children.candidate_of_files import CALL, candidate_of_files
from .source.children.comparison import same
from .source.problems import STRAY
from .source.reading.candidate_source import NoSource, candidate_source
from .source.reading.reached_functions import functions

_SHARE = 1 / 4  # of the budget: the longest call
_SHOWN = 3  # sentences about ended processes
_FUNCTION = ctypes.CFUNCTYPE(None).__mro__[1]  # the type of all functions of C libraries


class ProcessEnded(Exception):
    """The process of the candidate ended in this run."""


@dataclass(frozen=True)
class Crash:
    """A run in which the candidate's process ended."""

    case: str
    run: str
    sizes: Mapping[str, object]
    declared: bool
    text: str

    @property
    def sentence(self) -> str:
        if self.declared:
            return f"In case {self.case}, run {self.run!r}, {self.text}."
        sizes = ", ".join(f"{n} = {v}" for n, v in self.sizes.items())
        return f"At {sizes}, which no case declares, {self.text}. This is a note, not a fault."


@dataclass(eq=False)
class CrashSafeRunner:
    """The runner of a target. failed: the candidate has failed; before that, a crash is its first failure."""

    process: CandidateProcess
    cases: Sequence[Case]
    failed: bool = False
    crashes: list[Crash] = field(default_factory=list)

    def __call__(self, material: Material, settings: RunSettings) -> CandidateRun:
        try:
            return self.process(material, settings)
        except CandidateEnded as ended:
            now = hooks.RUNNING[-1] if hooks.RUNNING else None
            if not self.failed and not any(f.rung != QUALITY for f in (now.findings if now else ())):
                raise
            text = ended.text
        except NoZygote as error:
            now, text = None, f"its process could not be started: {error}"
        declared = any(dict(c.sizes) == dict(material.sizes) for c in self.cases)
        crash = Crash(material.case, now.run if now else "", material.sizes, declared, text)
        self.crashes.append(crash)
        return CandidateRun(error=ProcessEnded(text))

    def state_changed(self) -> bool:
        return self.process.state_changed()

    def cleared(self) -> AbstractContextManager[None]:
        return self.process.cleared()

    def close(self) -> None:
        self.process.close()

    @property
    def doubtful(self) -> bool:
        return self.process.doubtful

    def sentences(self) -> list[str]:
        """One for each size or run that ended the process, the first few of them."""
        return list(dict.fromkeys(c.sentence for c in self.crashes))[:_SHOWN]


def surviving(target: Target) -> Target:
    """The target whose candidate has a process of its own already, as a diagnosis runs it."""
    runner = target.runner
    again = isinstance(runner, CandidateProcess) and runner.again
    return replace(target, runner=CrashSafeRunner(cast("CandidateProcess", runner), target.cases)) if again else target


def in_own_process(target: Target, failing: Examination, budget: float | None) -> Target:
    """The target with a process for its candidate, if it may crash and gives the same results there."""
    if target.runner is not None or not may_crash(target, failing):
        return target
    seconds = CALL if budget is None else max(5.0, min(CALL, _SHARE * budget))
    try:
        process = candidate_of_files(candidate_source(target), failing.device, seconds=seconds)
        runner = CrashSafeRunner(process, target.cases, failed=True)
        moved = replace(target, runner=runner)
        material = replace(failing.material, target=moved)
        now, first = runner(material, RunSettings()), failing._first
    except (NoSource, NoZygote, CandidateEnded):
        return target
    before = {} if first is None else {n: t for n, _, t in first.results()}
    after = {n: t for n, _, t in now.results()}
    alike = now.error is None and before.keys() == after.keys() and all(same(t, after[n]) for n, t in before.items())
    if not alike and not runner.crashes:
        runner.close()
        return target
    failing.target, failing.material = moved, material
    return moved


def failed(target: Target) -> None:
    """Note that the candidate has failed, after which a crash is one more observation."""
    if isinstance(target.runner, CrashSafeRunner):
        target.runner.failed = True


def crashes(target: Target) -> list[str]:
    return target.runner.sentences() if isinstance(target.runner, CrashSafeRunner) else []


def crash_count(target: Target) -> int:
    return len(target.runner.crashes) if isinstance(target.runner, CrashSafeRunner) else 0


def close(target: Target) -> None:
    if isinstance(target.runner, CrashSafeRunner):
        target.runner.close()


def may_crash(target: Target, failing: Examination) -> bool:
    """Whether the candidate has touched memory that is not its own, or runs code that could: Triton, C."""
    found = any(f.kind in STRAY for f in failing.findings)
    known = found or failing.interpreted > 0 or target.source is not None
    return known or any(_calls_c(f) for f in functions(target.candidate))


def _calls_c(function: FunctionType) -> bool:
    return any(isinstance(v, ctypes.CDLL | _FUNCTION) for v in _values(function))


def _values(function: FunctionType) -> Iterator[object]:
    yield from (function.__globals__.get(name) for name in function.__code__.co_names)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
