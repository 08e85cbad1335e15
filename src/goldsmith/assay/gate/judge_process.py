"""A judge's process, forked from a zygote: it loads problems, judges candidates, and says so.

One JSON object a line, on its socket. Requests:

    {"number": 3, "problem": {"where": ..., "options": {...}}, "candidate": {...}, "options": {...}}

Replies: {"ready": true, "isolation": "..."} once; {"number": 3, "verdict": {...}} to each request. Before and after
each step of a problem's own code: {"step": "a call of its golden"} and {"step": ""}. What a problem prints goes to
stderr, and so does the stack when the parent asks for it with a signal.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any, TypedDict

from .isolation.sandbox import FULL
from .isolation.zygote_process import NoZygote, fork_own

DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
PROBLEMS_KEPT = 8


class JudgeRequest(TypedDict):
    """What the zygote hands on: its connection, the sandbox of the options, and whether to make spares."""

    control: int
    isolation: str
    spares: bool


def serve(private: socket.socket, request: JudgeRequest) -> int:
    """Answers the parent's requests until it closes the connection."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which closes the connection
    own = fork_own(socket.socket(fileno=request["control"]))
    own.spares = request["spares"]
    from ..declare import problem_steps
    from ..support.deadline import WRITE_STACK
    from .judging import isolation

    if request["isolation"] == "namespaces" and own.isolation != FULL:
        sys.stderr.write(isolation())
        return 1
    faulthandler.register(WRITE_STACK, all_threads=False)
    problem_steps.LISTENERS.append(lambda words: _say(private, {"step": words}))
    _say(private, {"ready": True, "isolation": isolation()})
    judge = CandidateJudge()
    for line in private.makefile("r", encoding="utf-8"):
        message = json.loads(line)
        _say(private, {"number": message["number"], "verdict": judge.verdict(message)})
    return 0


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
        except RuntimeError as error:  # of a step that raised KeyboardInterrupt
            text = f"{request['problem']['where']}: {error}"
            return Verdict(REFUSED, "problem", candidate.name, evidence=[text]).to_json()
        try:
            options = GateOptions.from_json(request["options"])
            verdict = next(iter(judge_all([candidate], problem, options=options)))
        except NoZygote:  # another judge has one
            raise
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


def _say(private: socket.socket, message: Mapping[str, object]) -> None:
    private.sendall(f"{json.dumps(message)}\n".encode())
