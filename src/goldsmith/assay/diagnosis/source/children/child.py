"""Child: a process that was forked to work on a candidate's files, and single questions to one."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ....gate.isolation.encoding import receive, send
from ....gate.isolation.limits import Limits
from ....gate.isolation.protocol import NONCE_BYTES, Closed, Connection, Malformed
from ....gate.isolation.sandbox import PASSED_ON
from ....gate.isolation.zygote_process import NoZygote, zygote
from ..reading.candidate_source import CandidateSource

_MEMORY = 2 << 30  # bytes


class NoAnswer(Exception):
    """The process could not be started or gave no answer; the text says why."""


@dataclass
class Child:
    pid: int
    connection: Connection

    @staticmethod
    def start(main: str, source: CandidateSource, *, boxed: bool = False, on_cuda: bool = False) -> Child:
        """main: "module:function", which gets a socket and the request; boxed: in a sandbox. Raises NoAnswer."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        ours, its = socket.socketpair()
        nothing = os.open(os.devnull, os.O_WRONLY)
        box = {"hidden": [], "full": not on_cuda, "environment": list(PASSED_ON)}
        request = {
            "do": "fork", "main": main, "nonce": nonce.hex(),
            "limits": Limits(memory_bytes=_MEMORY, files=4096, processes=4096).to_json(),
            "sandbox": box if boxed else None,
            "address_space": not on_cuda, "folder": os.getcwd(), "paths": list(source.paths),
        }  # fmt: skip
        try:
            answer = zygote().ask(request, [its.fileno(), nothing])
        except NoZygote as error:
            answer = {"problem": error}
        finally:
            its.close()
            os.close(nothing)
        if "problem" in answer:
            ours.close()
            raise NoAnswer(f"no child process could be started: {answer['problem']}")
        return Child(answer["pid"], Connection(ours, nonce))

    def close(self) -> None:
        with contextlib.suppress(NoZygote):
            zygote().ask({"do": "end", "pid": self.pid})
        self.connection.socket.close()


def single_request(main: str, source: CandidateSource, message: Mapping[str, object], until: float) -> object:
    """The answer of a new child. until: on the monotonic clock. Raises NoAnswer."""
    child = Child.start(main, source)
    try:
        send(child.connection, 0, {**source.to_arguments(), **message}, pickled=True)
        return receive(child.connection, until)[1]
    except TimeoutError as error:
        raise NoAnswer("it took too long") from error
    except (Closed, Malformed, OSError) as error:
        raise NoAnswer(f"the process ended early ({type(error).__name__})") from error
    finally:
        child.close()
