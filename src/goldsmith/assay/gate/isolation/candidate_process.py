"""A candidate's process as its judge sees it: loads, runs, and ends it; anything but one right reply ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from ....core.tracing import TargetError
from ...execute.plain_calls import LEAST
from ...execute.raised import frame_of_report
from ...execute.records import CandidateRun, Material, RunSettings
from ...support import memory_errors
from ...support.deadline import WRITE_STACK
from .encoding import Unsendable, receive, send
from .limits import Limits, Spent, children, resident_bytes, stored_bytes
from .protocol import Closed, Forged, Malformed
from .sandbox import FULL, PASSED_ON, Surroundings
from .wire import events_from_data, request_of, results_from_data
from .zygote_process import NoZygote, ZygoteProcess

T = TypeVar("T")
CRASHED, TIMED_OUT, OVER_MEMORY, CHEATING, REFUSED = "crashed", "timed_out", "over_memory", "cheating", "refused"
_REASONS = dict(
    crashed="process", timed_out="seconds", over_memory="memory_bytes", cheating="patched_runtime", refused="import"
)
_OF_WRITES = ", as code does that writes to a file descriptor which it did not open"
_KEPT = 64 << 10  # bytes of output to keep
_WATCH_EVERY = 0.1  # seconds
_GRACE, _PATIENCE = 1.0, 0.5  # seconds: from a connection's end to that of its process, for saying where it stands
_MOST_EVENTS, _LONGEST = 1000, 4000  # notes of a process, and characters of a text that it sends
_RECORDED, _RECORDED_BYTES = 4, 16 << 20  # last calls, and their inputs' size
_waiting: list[CandidateProcess] = []  # whose judge waits for a reply


class CandidateEnded(BaseException):
    """The candidate's process can answer no more. No `except Exception` on the way to the judge may swallow this.

    how     where the process died by itself: "by signal 11 (SIGSEGV)", "with status 0"; else ""
    signal  then its number, or 0
    stderr  what it printed last
    raised  what it raised that would have ended the program, or ""; where: at which line
    """

    def __init__(
        self, status: str, text: str, reason: str = "", *, how: str = "", stderr: str = "", raised: str = "",
        where: str = "", signal: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(text)
        self.status, self.text, self.reason = status, text, reason or _REASONS[status]
        self.how, self.stderr, self.raised, self.where, self.signal = how, stderr, raised, where, signal


@dataclass(eq=False)
class CandidateProcess:
    """One candidate in its own process. Called with arguments and settings, it makes one run: the runner of a target.

    loader, arguments: who makes the candidate in that process ("module:function"), and from what. library: makes a
    further argument, a compiled library.
    again: after its end, the next run starts another process. ahead: meanwhile the zygote makes a spare for the next
    candidate, if it makes any.
    spent: by all processes of this candidate.
    kept: key of the last run whose results stay in the process. dtypes: (case, output) -> those of all runs.
    """

    zygote: ZygoteProcess
    limits: Limits
    loader: str
    arguments: Mapping[str, object]
    around: Surroundings = Surroundings()
    again: bool = False
    ahead: bool = False
    library: Callable[[], bytes] | None = None
    spent: Spent = field(default_factory=Spent)
    seen: list[list[object]] = field(default_factory=list)
    parameters: dict[str, object] = field(default_factory=dict)
    clearing: bool = False
    kept: str = ""
    dtypes: dict[tuple[str, str], set[torch.dtype]] = field(default_factory=dict)
    pid: int = 0
    number: int = 0
    printed: int = 0
    output: bytearray = field(default_factory=bytearray)
    status: int | None = None
    recorded: deque[tuple[Material, RunSettings, CandidateRun]] = field(default_factory=lambda: deque(maxlen=_RECORDED))

    def __call__(self, material: Material, settings: RunSettings) -> CandidateRun:
        self._begin()
        calls = 2 if settings.between is not None else 1
        if settings.plain is not None:
            calls = min(len(settings.plain.schedule), LEAST + 1)
        message = {"do": "run", "cleared": self.clearing, **request_of(material, settings)}
        what = "a call" if calls == 1 else f"{calls} calls"
        reply = self._ask(message, calls * self.limits.seconds, what)
        asked = settings if settings.earlier == self.kept else replace(settings, earlier="")
        try:
            run = results_from_data(reply.get("run"), material, asked)
        except Malformed as error:
            return self._end(CRASHED, f"its process sent {error}")
        self.kept = settings.keep or self.kept
        for name, output in run.outputs.items():
            self.dtypes.setdefault((material.case, name), set()).add(output.dtype)
        if self.around.boxed and _stands_alone(settings) and _bytes(material) <= _RECORDED_BYTES:
            self.recorded.append((material, replace(settings, keep=""), run))
        return run

    def alone(self, material: Material, settings: RunSettings) -> CandidateRun:
        """The same run in a new process, which has made no other."""
        own = self.zygote, self.limits, self.loader, self.arguments, self.around
        process = CandidateProcess(*own, True, self.ahead, self.library, self.spent)
        try:
            return process(material, settings)
        finally:
            process.close()

    def load(self) -> dict[str, Any]:
        """Function -> its parameters, once the candidate is imported; CandidateEnded where that fails."""
        arguments = dict(self.arguments)
        if self.library is not None:
            arguments["library"] = self.library()
        self.parameters = self._made("load", arguments, "its import", "loaded", dict)
        return self.parameters

    def build(self) -> bytes:
        """What the loader compiles. It must be the only request to this process, so that nothing else has run there."""
        return self._made("build", dict(self.arguments), "its compilation", "built", bytes)

    def _made(self, do: str, arguments: dict[str, object], what: str, answer: str, kind: type[T]) -> T:
        """What the loader makes in a new process."""
        self._start()
        message = {"do": do, "loader": self.loader, "arguments": arguments}
        reply = self._ask(message, self.limits.import_seconds, what)
        if "refused" in reply:
            self._end(REFUSED, str(reply["refused"]), str(reply.get("reason", "")))
        value = reply.get(answer)
        if not isinstance(value, kind):
            return self._end(CRASHED, "its process sent a reply without what was asked for")
        return value

    def answer(self, request: dict[str, Any], what: str, read: Callable[[dict[str, Any]], T], calls: int = 1) -> T:
        """What `read` makes of the reply to a request; a reply that it calls Malformed ends the process."""
        reply = self._ask(request, calls * self.limits.seconds, what)
        try:
            return read(reply)
        except Malformed as error:
            return self._end(CRASHED, f"its process sent {error}")

    def state_changed(self) -> bool:
        """Whether calls have changed what the candidate keeps in its module and closures."""
        return bool(self.pid and self._ask({"do": "state"}, self.limits.seconds, "a question").get("changed"))

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Context in which runs see the state of before the first call."""
        self.clearing = True
        try:
            yield
        finally:
            self.clearing = False

    def close(self, grace: float = 0.0) -> None:
        """Ends the process and all that it started; it may end by itself within `grace` seconds."""
        if not self.pid:
            return
        pid, self.pid = self.pid, 0
        with contextlib.suppress(NoZygote):
            self.status = self.zygote.ask({"do": "end", "pid": pid, "grace": grace})["status"]
        self._drain()
        os.close(self.reading)
        self.connection.socket.close()

    # the process

    def _begin(self) -> None:
        if self.pid:
            return
        if not self.again:
            raise CandidateEnded(CRASHED, "its process has ended")
        self.load()

    def _start(self) -> None:
        self.kept = ""
        around = self.around
        box = {"hidden": list(around.hidden), "full": not around.gpu, "environment": list(PASSED_ON)}
        request = {
            "do": "fork",
            "main": f"{__package__}.child:serve",
            "limits": self.limits.of_a_process(),
            "address_space": around.boxed and not around.gpu,
            "gpu": around.gpu,
            "before": f"{__package__}.child:prepare_triton" if around.triton else "",
            "threads": around.threads,
            "paths": list(around.paths),
            "sandbox": box if around.boxed else None,
            "folder": os.getcwd(),
        }
        process = self.zygote.new_process(request, ahead=self.ahead)
        self.pid, self.home, self.reading = process.pid, f"{process.home}{os.sep}", process.reading
        self.connection = process.connection
        self.connection.waited, self.connection.beside = self._watch, self.reading
        self._drain()  # what a spare printed while it warmed up
        self.number, self.printed, self.status, self.watched_at = 0, 0, None, 0.0
        self.output.clear()
        self.resident = resident_bytes(self._candidate_pid())

    def _ask(self, message: dict[str, Any], seconds: float, what: str) -> dict[str, Any]:
        self.number += 1
        left = self.limits.total_seconds - self.spent.seconds if self.around.boxed else seconds
        began = time.monotonic()
        _waiting.append(self)
        try:
            if self.connection.pending():
                self._unasked()
            send(self.connection, self.number, message, pickled=True)
            number, reply = receive(self.connection, began + min(seconds, left))
        except Unsendable as error:
            raise TargetError(f"a value of the case cannot be sent to the candidate's process: {error}") from error
        except TimeoutError:
            text = f"{what} had not ended after {seconds:g} s"
            if left < seconds:
                text = f"its imports and calls had taken {self.limits.total_seconds:g} s together"
            where = self.where()
            self._end(TIMED_OUT, f"{text}, {where}" if where else text)
        except Malformed as error:
            self._end(CHEATING if isinstance(error, Forged) else CRASHED, f"it sent {error}{_OF_WRITES}")
        except Closed:
            self._died(what)
        except BaseException:  # the user's Ctrl-C, or a deadline: the call goes on there, and its reply would come late
            self.close()
            raise
        finally:
            _waiting.remove(self)
            self.spent.seconds += time.monotonic() - began
        if number != self.number:
            self._end(CHEATING, f"its process answered request {number}, and request {self.number} was open")
        if not isinstance(reply, dict):
            self._end(CRASHED, f"its process sent a {type(reply).__name__} where an answer belongs")
        reply = {name: self._without_home(value) for name, value in reply.items()}
        self._take(reply)
        return reply

    def _take(self, reply: dict[str, object]) -> None:
        """Keeps what was noted, and raises where the reply is that it cannot go on."""
        try:
            notes = events_from_data(reply.get("seen", []))
        except Malformed as error:
            self._end(CHEATING, f"its process sent {error}")
        self.seen += [[*map(self._without_home, note)] for note in notes[: _MOST_EVENTS - len(self.seen)]]
        if "problem" in reply:
            raise TargetError(str(reply["problem"]))
        if "memory" in reply:
            if not self.around.boxed:  # other programs may have taken it
                raise memory_errors.ElsewhereOutOfMemory(str(reply["memory"]))
            self._end(OVER_MEMORY, f"{reply['memory']}; it may use {self.limits.memory_bytes >> 20} MiB")
        if "ended" in reply:
            raised, where = str(reply["ended"]), str(reply.get("where", ""))
            text = f"it raised {raised}, which would have ended the program" + (f": {where}" if where else "")
            self._end(CRASHED, text, raised=raised, where=where)
        if "failed" in reply:
            self._end(CRASHED, str(reply["failed"]))

    def _unasked(self) -> None:
        """Says what bytes mean that came although no request was open."""
        try:
            number, _ = receive(self.connection, time.monotonic() + 1.0)
        except Closed:
            self._died("the time between two calls")
        except (Malformed, TimeoutError) as error:
            status = CHEATING if isinstance(error, Forged) else CRASHED
            self._end(status, f"its process sent, unasked, {str(error) or 'a part of a message'}")
        self._end(CHEATING, f"its process sent a second reply, to request {number}")

    def _watch(self) -> None:
        """While the judge waits: reads what the candidate prints, and looks at its memory."""
        self._drain()
        if self.printed > self.limits.output_bytes:
            self._end(CRASHED, f"it printed more than {self.limits.output_bytes} bytes")
        now = time.monotonic()
        if now < self.watched_at + _WATCH_EVERY:
            return
        self.watched_at = now
        self.look_at_memory()

    def look_at_memory(self) -> None:
        """Ends it where it has more memory now than it may."""
        used = resident_bytes(self.pid, self.resident)
        if self._in_namespaces:
            used += stored_bytes(self._candidate_pid())
        if used > self.limits.memory_bytes:
            where = self.where()
            text = f"it used {used >> 20} MiB; it may use {self.limits.memory_bytes >> 20}"
            self._end(OVER_MEMORY, f"{text} ({where})" if where else text)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):
                piece = os.read(self.reading, 1 << 16)
                if not piece:
                    self.connection.beside = -1  # nothing more can come, and select would always return at once
                    return
                self.printed += len(piece)
                self.output += piece
                del self.output[:-_KEPT]

    def _died(self, what: str) -> None:
        self.close(_GRACE)
        status = self.status or 0
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number:
            how = f"by signal {number} ({signal.Signals(number).name if number in list(signal.Signals) else 'unknown'})"
        else:
            how = f"with status {os.WEXITSTATUS(status)}"
        place, line = frame_of_report(self.text), self.last_line
        text = f"its process ended {how} during {what}" + (f", {place}" if place else "")
        text += f"; its last line: {line!r}" if line else ""
        raise CandidateEnded(CRASHED, text, how=how, stderr=self.text, signal=number)

    def _end(self, status: str, text: str, reason: str = "", *, raised: str = "", where: str = "") -> Any:
        self.close()
        raise CandidateEnded(status, text, reason, stderr=self.text, raised=raised, where=where)

    def where(self) -> str:
        """Where a call stands now, "in f (k.py, line 3)", or "": the process writes its stack when it is asked to."""
        if not self.pid:
            return ""
        before, until = self.printed, time.monotonic() + _PATIENCE
        with contextlib.suppress(OSError):
            os.kill(self._candidate_pid(), WRITE_STACK)
            while time.monotonic() < until:
                time.sleep(0.02)
                self._drain()
                if self.printed > before and self.text.endswith("\n"):
                    break
        return frame_of_report(self.text.rpartition("(most recent call first)")[2])

    def _candidate_pid(self) -> int:
        """The candidate's own process, which in a sandbox is the child of a child of the one that was forked."""
        pid = self.pid
        for _ in range(2 if self._in_namespaces else 0):
            pid = next(iter(children(pid)), pid)
        return pid

    @property
    def _in_namespaces(self) -> bool:
        return self.around.boxed and not self.around.gpu and self.zygote.isolation == FULL

    @property
    def doubtful(self) -> bool:
        """Whether it may mean to deceive: then a wrong result is looked at more closely."""
        return self.around.boxed

    @property
    def text(self) -> str:
        """What it printed last, without the path of its temporary home."""
        return self._without_home(self.output.decode(errors="replace"))

    def _without_home(self, value: Any) -> Any:
        if isinstance(value, str):
            value = value[:_LONGEST]
        return value.replace(self.home, "") if isinstance(value, str) and self.around.boxed else value

    @property
    def last_line(self) -> str:
        """The last line that it printed, without the report of a fatal signal."""
        lines = [s.strip() for s in self.text.partition("Fatal Python error")[0].splitlines() if s.strip()]
        return lines[-1][:200] if lines else ""


def _stands_alone(settings: RunSettings) -> bool:
    """Whether a run has nothing to do with other runs."""
    return settings.plain is settings.between is None and not settings.earlier


def _bytes(material: Material) -> int:
    return sum(t.numel() * t.element_size() for t in material.inputs.values())


def waiting_at() -> str:
    """Where the call stands that this process waits for, or ""."""
    return _waiting[-1].where() if _waiting else ""
