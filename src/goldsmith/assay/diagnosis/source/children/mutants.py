"""Mutants: edited copies of the candidate's files, tried by the hundred in a child process.

An edit that crashes its process, never ends or eats the memory costs one restart, and is an outcome like any other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ....gate.isolation.candidate_process import PASSED_ON
from ....gate.isolation.encoding import receive, send
from ....gate.isolation.limits import Limits
from ....gate.isolation.protocol import NONCE_BYTES, Closed, Connection, Malformed
from ....gate.isolation.zygote_process import NoZygote, zygote
from ..edits.edits import Edit
from ..reading.candidate_source import CandidateSource, NoSource

T = TypeVar("T")
CRASHED = "crashed"
_BATCH = 40
_MEMORY = 2 << 30  # bytes
_BEGIN = 90.0  # seconds for the files as they are
_LEAST, _TIMES = 0.5, 8.0  # seconds for one edit: at least, and as a multiple of what the files as they are take
_LARGER = 4.0  # times as many for a further problem, which may have larger sizes
_LATE = 1.0  # seconds more until the process is ended, since an alarm interrupts no C code


@dataclass(frozen=True)
class EditOutcome:
    """What an edited copy did. state: "right", "wrong", "raised", "slow" or "crashed".

    wrong: names of the wrong results of the problem that decided; share: of wrong elements, summed over them.
    changed: names of results that are others than those of the files as they are; moved: one of these is wrong there.
    """

    state: str
    wrong: tuple[str, ...] = ()
    share: float = 1.0
    problem: int = 0
    seconds: float = 0.0
    moved: bool = True
    changed: tuple[str, ...] = ()


class Mutants:
    """The child process, started anew whenever an edit ended it."""

    def __init__(
        self, source: CandidateSource, problems: Sequence[Mapping[str, object]], *, on_cuda: bool = False,
        boxed: bool = False,
    ):  # fmt: skip
        """boxed: run the edits in a sandbox, because a program of the user's wrote them."""
        self.source, self.problems, self.on_cuda, self.boxed = source, problems, on_cuda, boxed
        self.pid = 0
        self.number = 0
        self.restarts = 0
        self.ends = False  # the files as they are end their process
        self.extra: list[Mapping[str, object]] = []
        self.kinds: dict[str, dict[str, str]] = {}
        self.known: dict[str, object] | None = None  # what the first process found out about the files as they are
        self.original = self._begin()

    def tried(self, edits: Sequence[Edit]) -> Iterator[tuple[Edit, EditOutcome]]:
        """Each edit with its outcome, in order."""
        left = list(edits)
        while left:
            batch, left = left[:_BATCH], left[_BATCH:]
            while batch:
                done = 0
                for outcome in self._batch(batch):
                    yield batch[done], outcome
                    done += 1
                batch = batch[done:]

    def _batch(self, batch: Sequence[Edit]) -> Iterator[EditOutcome]:
        """Outcomes until the process ends."""
        if not self.pid:
            self._again()
        texts = [self.texts(edit) for edit in batch]
        seconds = self.seconds
        try:
            self.number += 1
            send(self.connection, self.number, {"do": "try", "edits": texts, "seconds": seconds}, pickled=True)
            for _ in batch:
                yield _outcome(self._receive(seconds + _LATE))
        except TimeoutError:
            self.close()
            self.restarts += 1
            yield EditOutcome("slow")
        except (Closed, Malformed, OSError):
            self.close()
            self.restarts += 1
            yield EditOutcome(CRASHED)

    def further(self, problem: Mapping[str, object]) -> EditOutcome | None:
        """Add a further problem for `confirmed`; the outcome of the files as they are, None if the process ended."""
        outcome = self._asked({"do": "further", "problem": problem}, self.seconds + _LATE, _outcome)
        if outcome is not None and outcome.state in ("right", "wrong"):
            self.extra.append(problem)
        return outcome

    def confirmed(self, texts: Mapping[str, str]) -> list[EditOutcome] | None:
        """The outcomes of the further problems, in which only that is wrong for which the edit is to blame."""
        seconds = _LARGER * self.seconds
        message = {"do": "confirm", "edited": dict(texts), "seconds": seconds}
        return self._asked(
            message, _LATE + seconds * max(1, len(self.extra)), lambda reply: [_outcome(r) for r in reply]
        )

    def more_work(self, texts: Mapping[str, str]) -> float:
        """The largest ratio of the work with the edit to that without, among the further problems; 1 if unknown."""
        seconds = self.seconds * max(1, len(self.extra))
        message = {"do": "work", "edited": dict(texts), "seconds": seconds}
        counts = self._asked(message, seconds + _LATE, _counts)
        return max((edited / own for own, edited in counts or () if own > 0), default=1.0)

    def depends_on_layouts(self) -> bool:
        """Whether the files as they are give other results for equal values in another layout."""
        return bool(self._asked({"do": "layouts"}, 10 * self.seconds + _LATE, bool))

    @property
    def seconds(self) -> float:
        """For one edit and one problem."""
        return max(_LEAST, _TIMES * self.original.seconds)

    def _again(self) -> None:
        """Another process, with the further problems that the last one had."""
        self._begin()
        for problem in self.extra:
            self._asked({"do": "further", "problem": problem, "known": True}, _BEGIN, _outcome)

    def _asked(self, message: Mapping[str, object], seconds: float, read: Callable[[Any], T]) -> T | None:
        if not self.pid:
            self._again()
        try:
            self.number += 1
            send(self.connection, self.number, message, pickled=True)
            return read(self._receive(seconds))
        except (TimeoutError, Closed, Malformed, OSError):
            self.close()
            self.restarts += 1
            return None

    def texts(self, edit: Edit) -> dict[str, str]:
        return {edit.path: edit.applied(self.source.files[edit.path].data).decode(errors="replace")}

    def _receive(self, seconds: float) -> object:
        """The next reply to the last request; replies to earlier ones were given up."""
        until = time.monotonic() + seconds
        while True:
            number, reply = receive(self.connection, until)
            if number == self.number:
                return reply

    def _begin(self) -> EditOutcome:
        nonce = secrets.token_bytes(NONCE_BYTES)
        ours, its = socket.socketpair()
        nothing = os.open(os.devnull, os.O_WRONLY)
        box = {"hidden": [], "full": not self.on_cuda, "environment": list(PASSED_ON)}
        request = {
            "do": "fork", "main": f"{__package__}.mutant_process:serve", "nonce": nonce.hex(),
            "limits": Limits(memory_bytes=_MEMORY, files=4096, processes=4096).to_json(),
            "sandbox": box if self.boxed else None,
            "address_space": not self.on_cuda, "folder": os.getcwd(), "paths": list(self.source.paths),
        }  # fmt: skip
        try:
            answer = zygote().ask(request, [its.fileno(), nothing])
        except NoZygote as error:
            ours.close()
            raise NoSource(f"no child process could be started: {error}") from error
        finally:
            its.close()
            os.close(nothing)
        if "problem" in answer:
            ours.close()
            raise NoSource(f"no child process could be started: {answer['problem']}")
        self.pid, self.connection, self.number = answer["pid"], Connection(ours, nonce), 0
        message = {
            "do": "begin",
            **self.source.to_arguments(),
            "problems": list(self.problems),
            "edited": self.source.edited_texts(),
            "unseen": self.ends,
            "known": self.known,
        }
        try:
            send(self.connection, 0, message, pickled=True)
            reply: Any = self._receive(_BEGIN)
            self.kinds = reply.get("kinds", {}) or self.kinds
            self.known = self.known or reply.get("known")
            return _outcome(reply)
        except (TimeoutError, Closed, Malformed, OSError) as error:
            self.close()
            if not self.ends:
                self.ends = True
                return self._begin()
            raise NoSource(
                f"the candidate could not be run again in a child process ({type(error).__name__})"
            ) from error

    def close(self) -> None:
        if self.pid:
            pid, self.pid = self.pid, 0
            with contextlib.suppress(NoZygote):
                zygote().ask({"do": "end", "pid": pid})
            self.connection.socket.close()

    def __enter__(self) -> Mutants:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _counts(reply: Any) -> list[tuple[int, int]]:
    try:
        return [(int(own), int(edited)) for own, edited in reply]
    except (TypeError, ValueError) as error:
        raise Malformed("counts that are none") from error


def _outcome(reply: Any) -> EditOutcome:
    """An outcome from what a child process says; Malformed for anything else."""
    try:
        return EditOutcome(
            str(reply["state"]), tuple(str(n) for n in reply["wrong"]), float(reply["share"]), int(reply["problem"]),
            float(reply["seconds"]), bool(reply["moved"]), tuple(str(n) for n in reply["changed"]),
        )  # fmt: skip
    except (TypeError, KeyError, ValueError) as error:
        raise Malformed("an outcome that is none") from error
