"""A judge's process: it loads problems, judges candidates, and says so.

    python -m goldsmith.assay.gate.judge_process auto | namespaces

One JSON object a line, on the pipes that were its stdin and stdout. Requests:

    {"number": 3, "problem": {"where": ..., "options": {...}}, "candidate": {...}, "options": {...}}

Replies: {"ready": true, "isolation": "..."} once; {"number": 3, "verdict": {...}} to each request. Before and after
each step of a problem's own code: {"step": "a call of its golden"} and {"step": ""}. What a problem prints goes to
stderr, and so does the stack when the parent asks for it with a signal.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import IO, Any

DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
PROBLEMS_KEPT = 8


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which closes the pipe
    requests, replies = _private_pipes()
    from ..declare import problem_steps
    from ..support.deadline import WRITE_STACK
    from .isolation.sandbox import FULL
    from .isolation.zygote_process import zygote
    from .judging import isolation

    if sys.argv[1] == "namespaces" and zygote().isolation != FULL:
        raise SystemExit(isolation())
    faulthandler.register(WRITE_STACK, all_threads=False)
    problem_steps.LISTENERS.append(lambda words: _say(replies, {"step": words}))
    _say(replies, {"ready": True, "isolation": isolation()})
    judge = CandidateJudge()
    for line in requests:
        request = json.loads(line)
        _say(replies, {"number": request["number"], "verdict": judge.verdict(request)})


class CandidateJudge:
    """Judges candidates; the problems that it read last stay loaded."""

    def __init__(self) -> None:
        self.problems: dict[str, object] = {}

    def verdict(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from .bad_problem import BadProblem
        from .candidate import Candidate
        from .judging import GateOptions, judge_all
        from .verdict import REFUSED, Verdict

        candidate = Candidate.from_json(request["candidate"])
        try:
            problem = self._problem(request["problem"])
        except BadProblem as error:
            return Verdict(REFUSED, "problem", candidate.name, evidence=[str(error)]).to_json()
        try:
            options = GateOptions.from_json(request["options"])
            verdict = next(iter(judge_all([candidate], problem, options=options)))
        except Exception as error:  # noqa: BLE001 - a fault of the judge is one candidate without a verdict
            text = f"the judge failed: {type(error).__name__}: {error}"
            return Verdict(REFUSED, "judge", candidate.name, evidence=[text]).to_json()
        return verdict.to_json()

    def _problem(self, data: Mapping[str, object]) -> Any:
        from ..declare.problem_steps import step
        from .formats.problem_source import ProblemSource

        key = json.dumps(data, sort_keys=True)
        if key not in self.problems:
            while len(self.problems) >= PROBLEMS_KEPT:
                self.problems.pop(next(iter(self.problems)))
            with step("reading it"):
                self.problems[key] = ProblemSource.from_json(data).load()
        return self.problems[key]


def _private_pipes() -> tuple[IO[str], IO[str]]:
    """The pipes to the parent, moved away from stdin and stdout, which a problem's code may use."""
    requests, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _say(replies: IO[str], message: Mapping[str, object]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
