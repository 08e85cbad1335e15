"""The main loop of a candidate's process: it loads the candidate, runs it when asked to, and returns plain data.

It judges nothing and holds no golden. A spare first runs a candidate of our own, and waits for "begin". Requests:
{"do": "build", ...}, {"do": "load", ...}, {"do": "run", ...}, {"do": "origins", ...}, {"do": "time", ...},
{"do": "timed_results", ...}, {"do": "late"}. Replies:

    {"built": bytes}            the candidate's library
    {"loaded": parameters}      the candidate is there
    {"refused": text}           it cannot be loaded
    {"run": results, "seen": [...]}
    {"times": [[us, us], ...]}  of timed calls, and {"outputs": [...]} of those that the judge asks for
    {"origins": {output: operator of torch that computed it}}
    {"late": sentences}         what has changed after its call
    {"problem": text}           the target is declared wrongly
    {"memory": text}            memory ran out
    {"ended": text}             the candidate raised what would end the program
    {"failed": text}            a call could not be finished, or its results could not be read
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any, cast

import torch
from torch import Tensor

from ....core.tracing import TargetError
from ...declare.target import Target
from ...execute import interpreter, raised
from ...execute.records import Material, RunSettings
from ...execute.run import execute_here
from ...execute.torch_state import hide_interpreter_warnings, neutral_state
from ...judge.known_functions import KnownFunctions
from ...judge.known_modules import KnownModules
from ...judge.process_state import ProcessState
from ...support import memory_errors
from ...support.candidate_state import CandidateState
from ...support.deadline import WRITE_STACK
from ...support.printable import text_of
from ...support.threads import running_threads
from ..timing.timed_calls import TimedCalls
from .candidate_side import CandidateSide, Parts
from .encoding import Unsendable, encode, receive, send, spans_of
from .events import EventLog
from .late_writes import LateWrites
from .limits import Limits, apply
from .loading import Refusal, parameters_of
from .origins import computed_by_torch
from .protocol import Closed, Connection
from .wire import materials_of, results_to_data, run_of

_LOOK_EVERY = 16  # runs, after which patches and settings are looked for, and after the first
_known: list[tuple[KnownFunctions, KnownModules]] = []  # as they were before the fork, where `prepare` has looked


def prepare() -> None:
    """What every candidate's process needs, done once before it is forked: Triton's import alone takes 0.2 s."""
    with interpreter.watching():
        pass
    hide_interpreter_warnings()
    ProcessState().begin()  # it imports NumPy's generators, and finds torch's flags
    _known.append((KnownFunctions(), KnownModules()))


def prepare_triton() -> None:
    """What Triton computes before its first kernel: its own hash (0.5 s) and the library of its driver (0.4 s of gcc).

    Creates no CUDA context and does not ask whether there is a GPU: a forked zygote that asks cannot be forked again.
    Where it fails, the candidate's process fails too, and its verdict says why.
    """
    with suppress(Exception):
        from triton.backends import backends
        from triton.runtime import driver
        from triton.runtime.cache import triton_key

        triton_key()
        if torch.version.hip is None:
            driver.set_active(backends["nvidia"].driver())


def serve(private: socket.socket, request: Mapping[str, Any]) -> int:
    """Answers the judge's requests until it closes the connection."""
    faulthandler.enable()
    faulthandler.register(WRITE_STACK, all_threads=False)  # the judge asks so where a call stands
    if request.get("threads"):
        torch.set_num_threads(request["threads"])
    connection = Connection(private, bytes.fromhex(request["nonce"]))
    if request["spare"]:
        try:
            _warm_up(torch.device(request["gpu"] or "cpu"))
            number, *_ = connection.receive()
        except Closed:
            return 0
        connection.send(number, "ready")
        apply(Limits(**request["limits"]), address_space=request["address_space"], boxed=request["sandbox"] is not None)
    # last is the user's current folder: a candidate's helpers may lie there, and must not stand for modules of Python
    sys.path[:] = dict.fromkeys([*request.get("paths", []), *sys.path, request["folder"]])
    if not _known:
        prepare()
    events = EventLog(*_known[0])
    parts: Parts | None = None
    reply: dict[str, Any]
    state: CandidateState | None = None
    timed, late, runs = TimedCalls(), LateWrites(), 0
    while True:
        try:
            number, message = receive(connection, pickled=True)
        except Closed:
            return 0
        if message["do"] == "build":
            library, reply = _made(message, events)
            reply = {"built": library, **reply}
        elif message["do"] == "load":
            if request["gpu"] and request["sandbox"] is not None:
                _limit_gpu_memory(request["gpu"], request["limits"]["memory_bytes"])
            parts, reply = _made(message, events)
            state = None if parts is None else CandidateState(parts)
            events.state.keep()
            if parts is not None:
                reply = {"loaded": parameters_of(parts), **reply}
                reply["seen"] += [["remark", sentence] for sentence in parts.remarks]
        elif parts is None or state is None:
            reply = {"problem": "no candidate is loaded"}
        elif message["do"] == "state":
            reply = {"changed": state.changed}
        elif message["do"] == "late":
            with events.listening():
                sentences = late.found()
            events.look_at_modules()
            reply = {"late": sentences, "seen": events.report()}
        elif message["do"] == "time":
            reply = _time(message, parts, timed, events)
        elif message["do"] == "timed_results":
            reply = {"outputs": timed.some(message["numbers"])}
        elif message["do"] == "origins":
            reply = _told(lambda: {"origins": computed_by_torch(materials_of(message, parts)[0])}, "a call")  # noqa: B023
        else:
            with state.cleared() if message["cleared"] else nullcontext():
                reply = _run(message, parts, events, late, thorough=runs % _LOOK_EVERY == 0)
            runs += 1
        try:
            send(connection, number, reply)
        except Unsendable as error:
            send(connection, number, {"problem": f"a result cannot be sent: {error}"})


def _warm_up(device: torch.device) -> None:
    """One run and its results: it creates the CUDA context, and loads those of torch's kernels that every run needs."""
    side = cast("Target", CandidateSide(Parts(lambda x: x * x), None, (), None, (), "auto"))
    with torch.random.fork_rng([device] if device.type == "cuda" else []), neutral_state(quiet=False):
        run = execute_here(Material(side, "", {}, {"x": torch.ones(8, 8).to(device)}, {}, 0), RunSettings())
        tensors: list[Tensor] = []
        encode(results_to_data(run), tensors)
        spans_of(tensors)
    del run, tensors
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _limit_gpu_memory(device: str, memory_bytes: int) -> None:
    """Limits what torch's allocator takes there. Memory that a candidate asks the driver for does not count."""
    index = torch.device(device).index or 0
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total), index)


def _made(message: Mapping[str, Any], events: EventLog) -> tuple[Any, dict[str, Any]]:
    """What the loader makes, or None and a reply that says why."""
    module, _, function = message["loader"].partition(":")
    make: Callable[..., Any] = getattr(importlib.import_module(module), function)
    try:
        with events.listening(importing=True):
            value = make(**message["arguments"])
    except Refusal as error:
        return None, {"refused": str(error), "reason": error.reason, "seen": events.report()}
    except TargetError as error:
        return None, {"problem": str(error), "seen": events.report()}
    except BaseException as error:  # noqa: BLE001 - a source may raise whatever it likes
        if memory_errors.out_of_memory(error):
            return None, {"memory": _wanted(error)}
        return None, {"refused": _import_error(error), "seen": events.report()}
    return value, {"seen": events.report()}


def _import_error(error: BaseException) -> str:
    where = "" if isinstance(error, SyntaxError) else raised.place(error)
    return f"importing it raised {_words(error)}"[:500] + where


def _words(error: BaseException) -> str:
    """The class of an exception, and its text if there is one."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _wanted(error: BaseException) -> str:
    """How much memory was asked for, and where."""
    return memory_errors.wanted(error) + raised.place(error)


def _ending(error: BaseException) -> dict[str, str]:
    """The reply where a call raised something that is no `Exception`."""
    return {"ended": _words(error)[:500], "where": raised.frame(error)}


def _time(message: Mapping[str, Any], parts: Parts, timed: TimedCalls, events: EventLog) -> dict[str, Any]:
    """Timed calls of a schedule, or of a chain."""
    materials = materials_of(message, parts)
    bound = materials[0].target.bound("candidate", materials[0].supply)
    arguments = message["arguments"]
    with events.listening():
        answer = _told(
            lambda: {"times": (timed.chain if "calls" in arguments else timed.run)(bound, materials, **arguments)},
            "a timed call",
        )
    return {**answer, "seen": events.report()}


def _told(answer: Callable[[], dict[str, Any]], where: str) -> dict[str, Any]:
    """The answer, or what stopped it."""
    try:
        return answer()
    except TargetError as error:
        return {"problem": str(error)}
    except Exception as error:  # noqa: BLE001 - a candidate may raise whatever it likes
        if memory_errors.out_of_memory(error):
            return {"memory": _wanted(error)}
        return {"failed": f"{where} raised {_words(error)}"[:500] + raised.place(error)}
    except BaseException as error:  # noqa: BLE001 - the same
        return _ending(error)


def _run(
    message: Mapping[str, object], parts: Parts, events: EventLog, late: LateWrites, *, thorough: bool
) -> dict[str, object]:
    material, settings = run_of(message, parts)
    thorough = thorough or settings.plain is not None  # a patch stays; plain calls are the last run of a case
    try:
        threads = running_threads()
        with neutral_state(quiet=False), events.listening(thorough=thorough):
            run = execute_here(material, settings)
        events.left(run.changed_settings)
        events.threads(running_threads() - threads)
    except TargetError as error:
        return {"problem": str(error), "seen": events.report()}
    except Exception as error:  # noqa: BLE001 - what the candidate returned may raise whenever it is touched
        if not memory_errors.out_of_memory(error):
            text = f"what it returned cannot be read: {_words(error)}"[:500] + raised.place(error)
            return {"failed": text, "seen": events.report()}
        memory_errors.release(material.device)
        return {"memory": _wanted(error)}
    except BaseException as error:  # noqa: BLE001 - a candidate may raise whatever it likes
        return {**_ending(error), "seen": events.report()}
    if run.error is not None and memory_errors.out_of_memory(run.error):
        return {"memory": _wanted(run.error)}
    if run.plain is not None:
        late.keep(run.plain)
    return {"run": results_to_data(run), "seen": events.report()}
