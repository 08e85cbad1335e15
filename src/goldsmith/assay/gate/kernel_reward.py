"""reward: verdicts as a reward function for trainers that learn from checks.

reward(completions=[...], **columns) -> list of numbers                            as TRL calls it
reward(solution_str=..., data_source=..., ground_truth=..., extra_info=...)        as verl calls it: one number
reward(solution_strs=[...], ...)                                                   as verl's batches: a list
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from .candidate import LANGUAGES, Candidate
from .formats import completions as completion_format
from .formats.problem_source import ProblemSource
from .judges import Judges, Pair
from .judging import GateOptions, judge_all
from .problem import Problem
from .verdict import ACCEPTED, STATUSES, Verdict

SCORES: Mapping[str, float] = {ACCEPTED: 1.0}  # all others: 0


def reward(
    problem: Problem | str | Path | Mapping[str, str | Path],
    *,
    scores: Mapping[str, float] | None = None,
    jobs: int = 0,
    options: GateOptions | None = None,
    column: str = "problem",
    language: str | None = None,
    **problem_options: object,
) -> Reward:
    """A reward function that judges the source in each completion.

    problem   a Problem, the file of one, or files by name: then each completion's is named by the data set's `column`
    scores    status -> reward; default {"accepted": 1.0}, and 0 for every status that is not listed
    jobs      judges that work at the same time; default: one for each core, at most 8
    options   device, limits, seed and others
    language  of the sources; default: by the completion's fenced block
    problem_options  as for `load_problem`

    The judges stay warm between calls. `.verdicts` holds those of the last call; `.close()` ends the processes.
    Raises BadProblem where a judge cannot load a problem, and TypeError, ValueError or TargetError for other arguments:
    a training run would otherwise go on with rewards of 0.
    """
    return Reward(problem, scores, jobs, options, column, language, problem_options)


class Reward:
    """Callable with completions; see `reward`."""

    __name__ = "kernel_reward"  # trainers log rewards under the function's name

    def __init__(
        self, problem: Problem | str | Path | Mapping[str, str | Path], scores: Mapping[str, float] | None, jobs: int,
        options: GateOptions | None, column: str, language: str | None, problem_options: Mapping[str, object],
    ) -> None:  # fmt: skip
        self.problem, self.column, self.language = problem, column, language
        self.problem_options = dict(problem_options)
        self.scores = {**dict.fromkeys(STATUSES, 0.0), **(SCORES if scores is None else scores)}
        unknown = [status for status in self.scores if status not in STATUSES]
        if unknown:
            raise ValueError(f"scores: {unknown[0]!r} is no status; there are: {', '.join(STATUSES)}")
        for status, score in self.scores.items():
            if isinstance(score, bool) or not isinstance(score, int | float):
                raise TypeError(f"scores: expected a number for {status!r}, got {score!r}")
        its = [name for name in problem_options if name in {f.name for f in fields(GateOptions)}]
        if its:
            raise TypeError(f"{its[0]}: no option of a problem; give options=gate.GateOptions({its[0]}=...)")
        if language is not None and language not in LANGUAGES:
            raise ValueError(f"language: {language!r} is unknown; there are: {', '.join(LANGUAGES)}")
        self.options = options or GateOptions()
        self.verdicts: list[Verdict] = []
        self.judges = Judges(jobs, self.options)
        self._end = weakref.finalize(self, self.judges.close)
        try:
            self.judges.check(self._sources())
        except BaseException:
            self.close()
            raise

    def __call__(self, completions: Sequence[Any] | None = None, **columns: Any) -> Any:
        if completions is not None:
            _check_several("completions", completions)
            names = columns.get(self.column)
            if isinstance(names, Sequence) and not isinstance(names, str) and len(names) != len(completions):
                counts = f"{len(names)} rows, and completions {len(completions)}"
                raise ValueError(f"reward: the column {self.column!r} has {counts}")
            return self._scores(completions, names)
        if "solution_strs" in columns:  # verl: a batch
            solutions = columns["solution_strs"]
            _check_several("solution_strs", solutions)
            infos = columns.get("extra_infos")
            infos = [None] * len(solutions) if infos is None else infos
            if len(infos) != len(solutions):
                raise ValueError(f"reward: extra_infos has {len(infos)} rows, and solution_strs {len(solutions)}")
            return self._scores(solutions, [self._named(info) for info in infos])
        if "solution_str" in columns:  # verl: one
            return self._scores([columns["solution_str"]], [self._named(columns.get("extra_info"))])[0]
        raise TypeError("reward: called without completions, solution_str or solution_strs")

    def close(self) -> None:
        """End the judges' processes; the next call starts new ones."""
        self.judges.close()

    def _named(self, info: object) -> object:
        return info.get(self.column) if isinstance(info, Mapping) else None

    def _scores(self, completions: Sequence[object], names: object) -> list[float]:
        candidates = [self._candidate(number, completion) for number, completion in enumerate(completions)]
        given = names if isinstance(names, Sequence) and not isinstance(names, str) else [names] * len(candidates)
        keys = [(c.source, c.language, str(name)) for c, name in zip(candidates, given, strict=True)]
        first = {key: number for number, key in reversed(list(enumerate(keys)))}  # equal completions are judged once
        chosen = sorted(first.values())
        if isinstance(self.problem, Problem):
            verdicts = list(judge_all([candidates[n] for n in chosen], self.problem, options=self.options))
        else:
            pairs: list[Pair] = [(self._source(given[n]), candidates[n]) for n in chosen]
            verdicts = list(self.judges.in_order(pairs))
        known = dict(zip(chosen, verdicts, strict=True))
        self.verdicts = [replace(known[first[key]], candidate=c.name) for key, c in zip(keys, candidates, strict=True)]
        return [self.scores[verdict.status] for verdict in self.verdicts]

    def _candidate(self, number: int, completion: object) -> Candidate:
        source, language = completion_format.source(completion)
        return Candidate(f"completion_{number}", source, language=self.language or language)

    def _sources(self) -> list[ProblemSource]:
        """All problems that a judge loads."""
        if isinstance(self.problem, Problem):
            return []
        if isinstance(self.problem, str | os.PathLike):
            return [self._source("")]
        if not isinstance(self.problem, Mapping) or not self.problem:
            kind = "an empty dict" if isinstance(self.problem, Mapping) else f"a {type(self.problem).__name__}"
            raise TypeError(f"problem: expected an assay.gate.Problem, a file, or files by name, got {kind}")
        return [self._source(name) for name in self.problem]

    def _source(self, name: Any) -> ProblemSource:
        if not isinstance(self.problem, Mapping):
            return ProblemSource(os.fspath(self.problem), self.problem_options)  # type: ignore[arg-type]
        if name not in self.problem:
            known = ", ".join(map(str, self.problem))
            raise ValueError(f"reward: the column {self.column!r} names the problem {name!r}; there are: {known}")
        return ProblemSource(os.fspath(self.problem[name]), self.problem_options)


def _check_several(argument: str, texts: object) -> None:
    """TypeError where one text or one message stands for the list of them."""
    if isinstance(texts, str | Mapping) or not isinstance(texts, Collection):
        raise TypeError(f"reward: {argument}: expected a list of completions, got a {type(texts).__name__}")
