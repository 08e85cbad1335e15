"""The child process: loads the candidate, runs it while everything is recorded, and answers with the first wrong line.

    {"modules", "origin", "backward", "files", "run", "sent", "golden", "bounds"}

golden: [name, numbers, group] of every intermediate; bounds: result -> (value, bound). The answer is the line as plain
data, or {"reason"} if there is none.
"""

from __future__ import annotations

import linecache
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...execute.interpreter import watching
from ...execute.records import CandidateRun, Material, PlainBackward, PlainCalls, RunSettings
from ...execute.run import execute
from ...execute.torch_state import neutral_state
from ...gate.isolation.candidate_side import Parts
from ...gate.isolation.encoding import receive, send
from ...gate.isolation.protocol import Closed, Connection
from ...gate.isolation.wire import run_of
from ..source.children.comparison import wrong_share
from ..source.children.edited_modules import install
from .faulty_line import UNSHOWN, FaultyLine, FoundValue
from .first_wrong_step import ComparedRun, WrongStep, ancestors, first_wrong_step, reads_of, region_of, suspects
from .lookup import GoldenValue, Lookup, look_up
from .recorder import Recorder, TooLong
from .substitution import Substituting, proven
from .tile_recording import tile_recording
from .torch_recording import TorchRecording

_PLAIN = RunSettings(plain=PlainCalls((), (0,), (PlainBackward(0),), watch=0.0))
_SHOWN = 4  # inputs of a line


def serve(private: socket.socket, request: Mapping[str, Any]) -> int:
    """Answers one request."""
    torch.set_num_threads(1)
    sys.path[:] = dict.fromkeys([*request["paths"], *sys.path])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    connection = Connection(private, bytes.fromhex(request["nonce"]))
    try:
        number, message = receive(connection, pickled=True)
        try:
            answer = _traced(message)
        except Exception as error:  # noqa: BLE001 - the candidate may raise anything
            answer = {"reason": f"{type(error).__name__}: {error}"[:300]}
        send(connection, number, answer)
    except Closed:
        pass
    return 0


@dataclass(frozen=True)
class _Sent(Material):
    """The arguments of a run with the output gradients that the golden's were computed from."""

    sent: Mapping[str, Tensor] = field(default_factory=dict)

    def cotangent(self, name: str, like: Tensor, power: int = 0) -> Tensor:
        known = name in self.sent and not power
        return self.sent[name].to(like.dtype) if known else super().cotangent(name, like, power)


def _traced(message: Mapping[str, Any]) -> dict[str, Any]:
    parts = install(message["modules"]).load({}, message["origin"], message["backward"])
    material, _ = run_of(message["run"], parts)
    values = [GoldenValue(*v) for v in message["golden"]]
    lookup = Lookup(values)
    until = time.monotonic() + message["seconds"]
    last = "the candidate raised"
    for dtype in (torch.float64, torch.float32, None):
        traced = _run(parts, material, dtype, message)
        if isinstance(traced, str):
            last = traced
            continue
        recorder, results, wrong = traced
        trace = _compared(recorder, lookup, results, wrong)
        wrong_step = _proven(trace, recorder, values, partial(_is_right, parts, material, dtype, message), until)
        wrong_step = wrong_step or first_wrong_step(trace)
        return {"reason": "no step is the first wrong one"} if wrong_step is None else _line(trace, lookup, wrong_step)
    return {"reason": last}


def _proven(
    trace: ComparedRun, recorder: Recorder, values: list[GoldenValue], right: Callable[[Substituting], bool],
    until: float,
) -> WrongStep | None:  # fmt: skip
    if recorder.launches or any(not v for v in trace.results.values()):
        return None
    proof = proven(recorder.steps, suspects(trace), values, right, until)
    if proof is None:
        return None
    first = first_wrong_step(trace, ancestors(trace.steps, {proof.step}))
    first = first or WrongStep(proof.step, tuple(trace.wrong))
    return replace(first, border=proof.step, instead=proof.what)


def _is_right(
    parts: Parts, material: Material, dtype: torch.dtype | None, message: Mapping[str, Any], mode: Substituting
) -> bool:
    own = _in_precision(material, dtype, message["sent"])
    with neutral_state(), mode:
        run = execute(own, _PLAIN)
        if run.error is not None or run.plain is None or not mode.made:
            return False
    return not _wrong(_results(run), message["bounds"])


def _in_precision(material: Material, dtype: torch.dtype | None, sent: Mapping[str, Tensor]) -> Material:
    inputs = {
        n: t.clone() if dtype is None or not t.is_floating_point() else t.to(dtype) for n, t in material.inputs.items()
    }
    return _Sent(**{**vars(material), "inputs": inputs}, sent=sent)


def _run(
    parts: Parts, material: Material, dtype: torch.dtype | None, message: Mapping[str, Any]
) -> tuple[Recorder, dict[str, set[int]], list[str]] | str:
    """(record, steps of each result, wrong results) of a run in this precision; or why it shows nothing."""
    own = _in_precision(material, dtype, message["sent"])
    recorder = Recorder(message["files"])
    try:
        with neutral_state(), watching(), TorchRecording(recorder), tile_recording(recorder):
            run = execute(own, _PLAIN)
            recorder.paused = True
    except TooLong:
        return "the run has too many operations"
    if isinstance(run.error, TooLong):
        return "the run has too many operations"
    if run.error is not None or run.plain is None:
        return f"the candidate raised {type(run.error).__name__}: {run.error}"[:200]
    results = _results(run)
    every = _wrong(results, message["bounds"])
    known = set(message["wrong"])
    wrong = [n for n in every if not known or n in known]
    if not wrong:
        return "a run while everything is recorded is right"
    if dtype is not None and len(every) > len(known) and known:
        return "other results are wrong in another precision"
    steps = {n: recorder.read(t) for n, t in results.items() if t is not None}
    return recorder, steps, wrong


def _wrong(results: Mapping[str, Tensor | None], bounds: Mapping[str, tuple[Tensor, Tensor]]) -> list[str]:
    return [n for n, (value, bound) in bounds.items() if wrong_share(results.get(n), value, bound)]


def _results(run: CandidateRun) -> dict[str, Tensor | None]:
    if run.plain is None:
        return {}
    return {**run.plain.outputs[0], **run.plain.grads.get(0, {})}


def _compared(recorder: Recorder, lookup: Lookup, results: dict[str, set[int]], wrong: list[str]) -> ComparedRun:
    matches, told = [], []
    for step in recorder.steps:
        match, count = look_up(lookup, step.parts, sorted(step.last.values()), max(step.coarse, 2.0**-40))
        matches.append(match)
        told.append(count)
    return ComparedRun(recorder.steps, matches, told, results, wrong)


def _line(trace: ComparedRun, lookup: Lookup, wrong_step: WrongStep) -> dict[str, Any]:
    step = trace.steps[wrong_step.step]
    if step.at is None:
        return {"reason": "the first wrong step has no line"}
    compared_count, missing = 0, 0
    if step.parts and not wrong_step.moved:
        compared_count, missing = lookup.missing(torch.cat(step.parts), max(step.coarse, 2.0**-40))
    inputs = []
    for number in sorted(step.parents - {step.number}):
        match, made = trace.matches[number], trace.steps[number]
        if match is not None:
            line = made.at.line if made.at is not None and not made.factory else 0
            inputs.append(FoundValue(line, made.operation, match.name, match.matched, match.negated))
    inputs = inputs[:_SHOWN]
    expression = linecache.getline(step.at.file, step.at.line).strip()
    region = _places(trace, region_of(trace, wrong_step.border))
    every = _places(trace, range(len(trace.steps)))
    border = trace.steps[wrong_step.border] if wrong_step.border >= 0 else None
    faulty = FaultyLine(
        step.at, expression, step.operation, tuple(inputs), compared_count, missing, wrong_step.tensors, step.backward,
        wrong_step.instead,
        border.at.line if border is not None and border.at is not None else 0,
        tuple(region), tuple(p for p in every if p not in region),
        tuple(_places(trace, sorted(reads_of(trace.steps, {wrong_step.step})))),
    )  # fmt: skip
    return {"line": {**faulty.to_json(), **{name: getattr(faulty, name) for name in UNSHOWN}}}


def _places(trace: ComparedRun, steps: Iterable[int]) -> dict[tuple[str, int], None]:
    places = (trace.steps[s].at for s in steps)
    return dict.fromkeys((at.file, at.line) for at in places if at is not None)
