"""Mutants: edited copies of the candidate's files, tried by the hundred in a child process.

An edit that crashes its process, never ends or eats the memory costs one restart, and is an outcome like any other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....gate.isolation.encoding import receive, send
from ....gate.isolation.limits import Limits
from ....gate.isolation.protocol import NONCE_BYTES, Closed, Connection, Malformed
from ....gate.isolation.zygote_process import NoZygote, zygote
from ..edits.edits import Edit
from ..reading.candidate_source import CandidateSource, NoSource

CRASHED = "crashed"
_BATCH = 40
_MEMORY = 2 << 30  # bytes
_BEGIN = 90.0  # seconds for the files as they are
_LEAST, _TIMES = 0.5, 8.0  # seconds for one edit: at least, and as a multiple of what the files as they are take
_LATE = 1.0  # seconds more until the process is ended, since an alarm interrupts no C code


@dataclass(frozen=True)
class EditOutcome:
    """What an edited copy did. state: "right", "wrong", "raised", "slow" or "crashed".

    wrong: names of the wrong results of the problem that decided; share: of wrong elements, summed over them.
    moved: a result that is wrong in the files as they are is another one now.
    """

    state: str
    wrong: tuple[str, ...] = ()
    share: float = 1.0
    problem: int = 0
    seconds: float = 0.0
    moved: bool = True


class Mutants:
    """The child process, started anew whenever an edit ended it."""

    def __init__(self, source: CandidateSource, problems: Sequence[Mapping[str, object]], *, on_cuda: bool = False):
        self.source, self.problems, self.on_cuda = source, problems, on_cuda
        self.pid = 0
        self.restarts = 0
        self.kinds: dict[str, dict[str, str]] = {}
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
            self._begin()
        texts = [self.texts(edit) for edit in batch]
        seconds = max(_LEAST, _TIMES * self.original.seconds)
        try:
            send(self.connection, 1, {"do": "try", "edits": texts, "seconds": seconds}, pickled=True)
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

    def texts(self, edit: Edit) -> dict[str, str]:
        return {edit.path: edit.applied(self.source.files[edit.path].data).decode(errors="replace")}

    def _receive(self, seconds: float) -> object:
        return receive(self.connection, time.monotonic() + seconds)[1]

    def _begin(self) -> EditOutcome:
        nonce = secrets.token_bytes(NONCE_BYTES)
        ours, its = socket.socketpair()
        nothing = os.open(os.devnull, os.O_WRONLY)
        request = {
            "do": "fork", "main": f"{__package__}.mutant_process:serve", "nonce": nonce.hex(),
            "limits": Limits(memory_bytes=_MEMORY, files=4096, processes=4096).to_json(), "sandbox": None,
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
        self.pid, self.connection = answer["pid"], Connection(ours, nonce)
        message = {"do": "begin", **self.source.to_arguments(), "problems": list(self.problems)}
        try:
            send(self.connection, 0, message, pickled=True)
            reply: Any = self._receive(_BEGIN)
            self.kinds = reply.get("kinds", {})
            return _outcome(reply)
        except (TimeoutError, Closed, Malformed, OSError) as error:
            self.close()
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


def _outcome(reply: Any) -> EditOutcome:
    """An outcome from what a child process says; Malformed for anything else."""
    try:
        return EditOutcome(
            str(reply["state"]), tuple(str(n) for n in reply["wrong"]), float(reply["share"]), int(reply["problem"]),
            float(reply["seconds"]), bool(reply["moved"]),
        )  # fmt: skip
    except (TypeError, KeyError, ValueError) as error:
        raise Malformed("an outcome that is none") from error
