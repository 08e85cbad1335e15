"""The main loop of a child process that tries edited copies: loads each, runs it on failing cases, compares.

    {"do": "begin", "modules", "origin", "backward", "problems": [...]}   answered with the outcome of the files as they
                                                            are, and the kinds of values that their variables hold
    {"do": "try", "edits": [{path: text}, ...], "seconds"}  answered with one outcome for each, in order

An outcome has "state": "right", "wrong", "raised" or "slow"; "wrong": names of results; "share" of wrong elements;
"problem": number of the one that decided; "seconds"; "moved": whether a result that was wrong is another one now.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....bounds.bounded import SLACK
from ....execute.records import PlainCalls, RunSettings
from ....execute.run import execute
from ....execute.torch_state import neutral_state
from ....gate.isolation.candidate_side import Parts
from ....gate.isolation.encoding import receive, send
from ....gate.isolation.protocol import Closed, Connection
from ....gate.isolation.wire import run_of
from ..reading.value_kinds import Kinds, observing
from .edited_modules import EditedModules, install

RIGHT, WRONG, RAISED, SLOW = "right", "wrong", "raised", "slow"
_FIRST = 60.0  # seconds for the files as they are
_COLLECT_EVERY = 50
_PLAIN = RunSettings(plain=PlainCalls((), (0,), (0,), watch=0.0))


class _Overtime(BaseException):
    """The alarm: nothing that catches exceptions of a kernel may catch it."""


def _ring(number: int, frame: object) -> None:
    raise _Overtime


def serve(private: socket.socket, request: Mapping[str, Any]) -> int:
    """Answers requests until the parent closes the connection."""
    torch.set_num_threads(1)
    sys.path[:] = dict.fromkeys([*request["paths"], *sys.path])
    signal.signal(signal.SIGALRM, _ring)
    connection = Connection(private, bytes.fromhex(request["nonce"]))
    search: _Mutant | None = None
    tried = 0
    while True:
        try:
            number, message = receive(connection, pickled=True)
            if message["do"] == "begin":
                search = _Mutant(install(message["modules"]), message)
                send(connection, number, search.first())
                continue
            for edited in message["edits"]:
                if search is not None:
                    send(connection, number, search.outcome(edited, message["seconds"]))
                tried += 1
                if tried % _COLLECT_EVERY == 0:
                    gc.collect()
        except Closed:
            return 0


class _Mutant:
    def __init__(self, modules: EditedModules, message: Mapping[str, Any]):
        self.modules, self.origin, self.own = modules, message["origin"], message["backward"]
        self.problems = message["problems"]
        self.results: dict[str, Tensor | None] = {}  # that are wrong in the files as they are
        self.kinds: Kinds = {}

    def first(self) -> dict[str, Any]:
        """The outcome of the files as they are, timed without what is noted on the way."""
        with observing(frozenset(self.modules.modules.values()), self.kinds):
            first = self.outcome({}, _FIRST)
        self.results = {n: t for n, t in self.last.items() if n in first["wrong"]}
        return {**self.outcome({}, _FIRST), "kinds": self.kinds} if first["state"] != SLOW else {**first, "kinds": {}}

    def outcome(self, edited: Mapping[str, str], seconds: float) -> dict[str, Any]:
        began = time.perf_counter()
        number, outcome = 0, _outcome(RAISED)
        self.last: dict[str, Tensor | None] = {}
        moved = False
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            parts = self.modules.load(edited, self.origin, self.own)
            for number, problem in enumerate(self.problems):
                outcome = self._tried(parts, problem)
                moved = moved or number == 0 and not all(_same(t, self.last.get(n)) for n, t in self.results.items())
                if outcome["state"] != RIGHT:
                    break
        except _Overtime:
            outcome = _outcome(SLOW)
        except BaseException:  # noqa: BLE001 - an edited copy may raise anything, on import as well
            outcome = _outcome(RAISED)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return {**outcome, "problem": number, "seconds": time.perf_counter() - began, "moved": moved}

    def _tried(self, parts: Parts, problem: Mapping[str, Any]) -> dict[str, Any]:
        """A plain call first, which costs a part of a run; what is right then is run with poison and guard bands."""
        material, settings = run_of(problem["run"], parts)
        with neutral_state():
            plain = execute(material, _PLAIN)
            if plain.error is not None or plain.plain is None:
                return _outcome(RAISED)
            self.last = {**plain.plain.outputs[0], **plain.plain.grads.get(0, {})}
            outcome = compared(self.last, problem["golden"])
            if outcome["state"] != RIGHT:
                return outcome
            run = execute(material, settings)
        if run.error is not None:
            return _outcome(RAISED)
        outcome = compared({name: tensor for name, _, tensor in run.results()}, problem["golden"])
        harm = run.changed or run.overruns or run.unwritten
        return _outcome(WRONG, ["memory"]) if harm and outcome["state"] == RIGHT else outcome


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return one is other
    return bool(((one == other) | (one != one) & (other != other)).all())


def _outcome(state: str, wrong: list[str] | None = None, share: float = 1.0) -> dict[str, Any]:
    return {"state": state, "wrong": wrong or [], "share": share}


def compared(results: Mapping[str, Tensor | None], golden: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """The outcome of a run. golden: result -> (value, bound)."""
    shares = {name: wrong_share(results.get(name), value, bound) for name, (value, bound) in golden.items()}
    wrong = [name for name, share in shares.items() if share]
    return _outcome(WRONG if wrong else RIGHT, wrong, sum(shares.values()))


def wrong_share(tensor: Tensor | None, value: Tensor, bound: Tensor) -> float:
    """The share of elements that exceed the bound; 1 for a missing tensor or another shape."""
    if tensor is None:
        return 1.0 if bool(value.count_nonzero()) else 0.0
    if tensor.shape != value.shape:
        return 1.0
    got = tensor.detach().to("cpu", torch.float64)
    right = ((got - value).abs() <= SLACK * bound) | (got == value) | (torch.isnan(got) & torch.isnan(value))
    right &= torch.isfinite(got) | ~torch.isfinite(value)
    wrong = right.numel() - int(right.count_nonzero())
    return wrong / max(1, right.numel()) if wrong else 0.0
