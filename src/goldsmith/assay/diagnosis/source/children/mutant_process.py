"""The main loop of a child process that tries edited copies: loads each, runs it on failing cases, compares.

    {"do": "begin", "modules", "origin", "backward", "problems": [...], "edited": {path: text}, "unseen"}
                                                            answered with the outcome of the files as they are (or as
                                                            they were edited before), and the kinds of values that their
                                                            variables hold; unseen: without running them, since they end
                                                            their process; known: what an earlier process
                                                            answered, for which they need not run again
    {"do": "try", "edits": [{path: text}, ...], "seconds"}  answered with one outcome for each, in order
    {"do": "further", "problem", "known"}                   a further problem; answered with the outcome of the files;
                                                            known: another process has taken it before
    {"do": "confirm", "edited": {path: text}, "seconds"}    answered with the outcomes of all further problems
    {"do": "work", "edited", "seconds"}                     answered with how many times the work of the files
                                                            it is, in each further problem; [] if one cannot be run
    {"do": "layouts"}                                       whether the files as they are depend on layouts
    {"do": "launches", "edited", "seconds"}                 answered with the launches of Triton kernels, in the first
                                                            problem; None stands for one without a name

An outcome has "state": "right", "wrong", "raised" or "slow"; "wrong": names of results, or what else is wrong; "share"
of wrong elements; "problem": number of the one that decided; "changed": names of results that are others than those of
the files as they are; "moved": whether one of these is wrong in them; "stages": of a right edit, those that differ from
the golden. "seconds" are those of the processor everywhere, since others may keep it busy.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....execute import interpreter
from ....execute.memory import LAYOUTS
from ....execute.records import Material, PlainBackward, PlainCalls, RunSettings
from ....execute.run import execute
from ....execute.torch_state import neutral_state
from ....gate.isolation.candidate_side import Parts
from ....gate.isolation.encoding import receive, send
from ....gate.isolation.protocol import Closed, Connection
from ....gate.isolation.wire import run_of
from ....support.stage_tiles import join_pieces
from ..reading.value_kinds import Kinds, observing
from .comparison import blamed_share, same, wrong_share
from .counted_work import CountedWork, Counts, more_work
from .edited_modules import EditedModules, install
from .forked_outcome import CRASHED, SLOW, WAIT, forked
from .known_kernels import reuse_rewritten
from .launches import recorded_launches
from .returned_gradients import Misfit

RIGHT, WRONG, RAISED = "right", "wrong", "raised"
MISFIT, EXCHANGED = "shape or dtype of a gradient", "names of stages"  # wrong beside results
_FIRST = 60.0  # seconds for the files as they are
_COLLECT_EVERY = 50
_PLAIN = RunSettings(plain=PlainCalls((), (0,), (PlainBackward(0),), watch=0.0))
_FORWARD = RunSettings(plain=PlainCalls((), (0,), watch=0.0))


class _Overtime(BaseException):
    """The alarm: nothing that catches exceptions of a kernel may catch it."""


def _ring(number: int, frame: object) -> None:
    raise _Overtime


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises _Overtime after these seconds of the processor, or WAIT times as many by the clock."""
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, WAIT * seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def serve(private: socket.socket, request: Mapping[str, Any]) -> int:
    """Answers requests until the parent closes the connection."""
    torch.set_num_threads(1)
    sys.path[:] = dict.fromkeys([*request["paths"], *sys.path])
    signal.signal(signal.SIGPROF, _ring)
    signal.signal(signal.SIGALRM, _ring)
    connection = Connection(private, bytes.fromhex(request["nonce"]))
    search: _Mutant | None = None
    tried = 0
    while True:
        try:
            number, message = receive(connection, pickled=True)
            if message["do"] == "begin":
                search = _Mutant(install(message["modules"], message.get("libraries", "")), message)
                send(connection, number, search.first())
                continue
            if message["do"] != "try":
                send(connection, number, None if search is None else search.answer(message))
                continue
            for edited in message["edits"]:
                if search is not None:
                    send(connection, number, search.tried(edited, message["seconds"]))
                tried += 1
                if tried % _COLLECT_EVERY == 0:
                    gc.collect()
        except Closed:
            return 0


class _Mutant:
    def __init__(self, modules: EditedModules, message: Mapping[str, Any]):
        self.modules, self.origin, self.own = modules, message["origin"], message["backward"]
        self.problems = message["problems"]
        self.base, self.unseen, self.known = message["edited"], message["unseen"], message["known"]
        self.guarded = False
        self.results: dict[str, Tensor | None] = {}  # of the files as they are
        self.wrong: list[str] = []
        self.decided = 0  # the problem whose results these are
        self.misfits: set[Misfit] = set()
        self.kinds: Kinds = {}
        self.apart = bool(message.get("libraries")) and not torch.cuda.is_initialized()
        self.quick: ExitStack | None = None  # Triton's interpreter without needless work, once it is there
        self.further: list[tuple[Mapping[str, Any], dict[str, Tensor | None]]] = []

    def first(self) -> dict[str, Any]:
        """The outcome of the files as they are, timed without what is noted on the way."""
        if self.unseen:
            self.wrong = list(self.problems[0]["golden"])
            nothing = {"problem": 0, "seconds": 0.0, "moved": True, "changed": [], "kinds": {}}
            return {**_outcome(CRASHED, self.wrong), **nothing}
        if self.known is not None:
            names = "results", "wrong", "decided", "misfits"
            self.results, self.wrong, self.decided, misfits = (self.known[n] for n in names)
            self.misfits = set(misfits)
            self.outcome(self.base, _FIRST)  # what is imported on the way, such as triton, is in no edit's time
            return self.known["outcome"]
        with observing(frozenset(self.modules.modules.values()), self.kinds):
            first = self.outcome(self.base, _FIRST)
        self.results, self.wrong, self.decided = dict(self.last), list(first["wrong"]), first["problem"]
        self.misfits = set(self.modules.misfits)
        outcome = first if first["state"] == SLOW else self.outcome(self.base, _FIRST)
        known = {
            "results": self.results, "wrong": self.wrong, "decided": self.decided, "misfits": sorted(self.misfits),
            "outcome": outcome,
        }  # fmt: skip
        return {**outcome, "kinds": {} if first["state"] == SLOW else self.kinds, "known": known}

    def tried(self, edited: Mapping[str, str], seconds: float) -> dict[str, Any]:
        """The outcome of an edit. One of C++ runs in a process of its own, since it may write anywhere."""
        return forked(partial(self.outcome, edited), seconds) if self.apart else self.outcome(edited, seconds)

    def answer(self, message: Mapping[str, Any]) -> object:
        if message["do"] == "further":
            outcome, results = self._once(self.base, message["problem"], _FIRST)
            if outcome["state"] in (RIGHT, WRONG) or message.get("known"):
                self.further.append((message["problem"], results))
            return outcome
        if message["do"] == "confirm":
            edited, seconds = message["edited"], message["seconds"]
            return [self._confirmed(edited, problem, before, seconds) for problem, before in self.further]
        if message["do"] == "work":
            return self._work(message["edited"], message["seconds"])
        if message["do"] == "launches":
            with recorded_launches() as found:
                self.outcome(message["edited"], message["seconds"])
            return list(found)
        return self._depends_on_layouts()

    def _work(self, edited: Mapping[str, str], seconds: float) -> list[float]:
        """How many times the work of the files as they are the edit makes, in every further problem."""
        counts: list[list[Counts]] = [[] for _ in self.further]
        try:
            with _limited(seconds):
                for texts in (self.base, edited):
                    parts = self.modules.load(texts, self.origin, self.own)
                    for (problem, _), row in zip(self.further, counts, strict=True):
                        material, _ = run_of(problem["run"], parts)
                        with neutral_state(), CountedWork(material.target) as work, work.of_tiles():
                            execute(material, _PLAIN)
                        row.append(work.counts)
        except BaseException:  # noqa: BLE001 - an edited copy may raise anything
            return []
        return [more_work(own, changed) for own, changed in counts]

    def _confirmed(
        self, edited: Mapping[str, str], problem: Mapping[str, Any], before: Mapping[str, Tensor | None], seconds: float
    ) -> dict[str, Any]:
        """Wrong only where the edit is to blame: an element was right before, or is finite and another than before."""
        outcome, results = self._once(edited, problem, seconds)
        if outcome["state"] != WRONG:
            return outcome
        golden = problem["golden"]
        shares = {name: blamed_share(results.get(name), before.get(name), *golden[name]) for name in golden}
        wrong = [name for name, share in shares.items() if share]
        wrong += [name for name in outcome["wrong"] if name not in golden]
        return {**outcome, **_outcome(WRONG if wrong else RIGHT, wrong, sum(shares.values()))}

    def _once(
        self, edited: Mapping[str, str], problem: Mapping[str, Any], seconds: float
    ) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
        """The outcome of one problem and its results, between guard bands, since a wrong kernel may write anywhere."""
        kept, self.problems, self.guarded = self.problems, [problem], True
        try:
            outcome = self.outcome(edited, seconds)
        finally:
            self.problems, self.guarded = kept, False
        return outcome, dict(self.last)

    def _depends_on_layouts(self) -> bool:
        """Whether equal values in another layout give other results, in the files as they are."""
        problem = self.problems[0]
        parts = self.modules.load(self.base, self.origin, self.own)
        material, settings = run_of(problem["run"], parts)
        runs = []
        for layout in (None, *LAYOUTS):
            named = {} if layout is None else dict.fromkeys(material.inputs, layout)
            try:
                with neutral_state():
                    run = execute(material, replace(settings, layouts=named))
            except Exception:  # noqa: BLE001 - a kernel may raise anything for a layout
                return True
            runs.append(None if run.error is not None else {name: tensor for name, _, tensor in run.results()})
        first = runs[0]
        return first is not None and any(
            run is None or not all(same(t, run.get(n)) for n, t in first.items()) for run in runs[1:]
        )

    def outcome(self, edited: Mapping[str, str], seconds: float) -> dict[str, Any]:
        began = time.process_time()
        if self.quick is None and interpreter.MODULE in sys.modules:
            self.quick = ExitStack()
            self.quick.enter_context(interpreter.watching())
            reuse_rewritten(sys.modules[interpreter.MODULE])
        number, outcome = 0, _outcome(RAISED)
        self.last: dict[str, Tensor | None] = {}
        self.error = ""
        changed: list[str] = []
        try:
            with _limited(seconds):
                parts = self.modules.load(edited, self.origin, self.own)
                for number, problem in enumerate(self.problems):
                    outcome = self._tried(parts, problem)
                    if number == self.decided and self.last:
                        changed = [n for n, t in self.last.items() if not same(t, self.results.get(n))]
                    if outcome["state"] != RIGHT:
                        break
                if outcome["state"] == RIGHT and self.modules.misfits - self.misfits and self.results:
                    outcome = _outcome(WRONG, [MISFIT])
        except _Overtime:
            outcome = _outcome(SLOW)
        except BaseException as error:  # noqa: BLE001 - an edited copy may raise anything, on import as well
            outcome, self.error = _outcome(RAISED), f"{type(error).__name__}: {error}"[:200]
        moved = not self.results or any(n in self.wrong for n in changed)
        return {
            **outcome,
            "problem": number,
            "seconds": time.process_time() - began,
            "moved": moved,
            "changed": changed,
        }

    def _tried(self, parts: Parts, problem: Mapping[str, Any]) -> dict[str, Any]:
        """A plain call first, which costs a part of a run; what is right then is run with poison and guard bands.

        Without the plain call if the candidate writes past the end of its buffers: without bands, that is the memory
        of this process, such as the golden's numbers.
        """
        material, settings = run_of(problem["run"], parts)
        with neutral_state():
            whole = bool(settings.layouts) or settings.backwards or self.guarded or problem.get("banded", False)
            if not whole:
                forward = self._without_gradients(material, problem)
                if forward is not None:
                    return forward
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
        results = {name: tensor for name, _, tensor in run.results()}
        golden = {name: value for name, ((value, _), _) in problem["stages"].items()}
        join_pieces(run.stages, run.covered, golden)
        if whole:
            self.last = results
        stages = {n: against for n, (against, right) in problem["stages"].items() if right}
        outcome = compared({**run.stages, **results}, {**problem["golden"], **stages})
        if outcome["state"] == RIGHT:
            outcome = self._with_stages(run.stages, {n: a for n, (a, _) in problem["stages"].items()})
        harm = run.changed or run.overruns or run.unwritten
        harmed = harm and outcome["state"] == RIGHT and not self.guarded
        return _outcome(WRONG, ["memory"]) if harmed else outcome

    def _with_stages(
        self, stages: Mapping[str, Tensor | None], golden: Mapping[str, tuple[Tensor, Tensor]]
    ) -> dict[str, Any]:
        """A right edit with the stages that still differ; wrong if one of them holds what another of them should."""
        differ = [n for n in stages if n in golden and wrong_share(stages[n], *golden[n])]
        exchanged = any(
            other != name and stages[name] is not None and not wrong_share(stages[name], *golden[other])
            for name in differ
            for other in differ
        )
        return _outcome(WRONG, [EXCHANGED]) if exchanged else _outcome(RIGHT, stages=differ)

    def _without_gradients(self, material: Material, problem: Mapping[str, Any]) -> dict[str, Any] | None:
        """While an output is wrong that is wrong in the files as they are, gradients need not be computed."""
        gradients = [n for n in self.wrong if n.endswith(".grad")]
        outputs = {n: v for n, v in problem["golden"].items() if not n.endswith(".grad")}
        if problem is not self.problems[self.decided] or not gradients or len(gradients) == len(self.wrong):
            return None
        plain = execute(material, _FORWARD)
        if plain.error is not None or plain.plain is None:
            return _outcome(RAISED)
        self.last = dict(plain.plain.outputs[0])
        outcome = compared(self.last, outputs)
        if outcome["state"] == RIGHT:
            return None
        return _outcome(WRONG, [*outcome["wrong"], *gradients], outcome["share"] + len(gradients))


def _outcome(
    state: str, wrong: list[str] | None = None, share: float = 1.0, stages: Sequence[str] = ()
) -> dict[str, Any]:
    return {"state": state, "wrong": wrong or [], "share": share, "stages": list(stages)}


def compared(results: Mapping[str, Tensor | None], golden: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """The outcome of a run. golden: result -> (value, bound)."""
    shares = {name: wrong_share(results.get(name), value, bound) for name, (value, bound) in golden.items()}
    wrong = [name for name, share in shares.items() if share]
    return _outcome(WRONG if wrong else RIGHT, wrong, sum(shares.values()))
