"""ModelServer: the batcher and the HTTP server of one offloaded model, from the start to the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import queue
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ...offload.attach import Offloaded
from ..model_types import Tokenizer
from .application import PATIENCE, application
from .batcher import Batcher, Served, ServingLimits
from .refusals import UNAVAILABLE, RequestRefusal
from .running_text import Event, Piece, RunningText, Sampling, TextRequest
from .service import Service
from .watched_files import WatchedFiles

FIRST_PROMPT, FIRST_TOKENS = 20, 3  # of the text that a server computes before it listens
LAST_ANSWERS = 3.0  # seconds in which open connections get the rest of their answers
LAST_CALL = 20.0  # seconds for the model's call under way to end at its next layer
LAST_READ = 1.0  # seconds in which a client may read why its connection ends
LINGER = 1.25  # times the most connections: with more, they end at once
NO_FILES = errno.EMFILE, errno.ENFILE
SILENCE = 60.0  # seconds between two reports that no file is free
BACKLOG = 128
MOST_CONNECTIONS = 4096


class ModelServer:
    """Serves an offloaded model. names: {name in requests: adapter or None}; places: folders whose files are watched;
    report: gets a sentence about each failure."""

    def __init__(
        self, offloaded: Offloaded, tokenizer: Tokenizer, limits: ServingLimits, names: Mapping[str, str | None],
        places: Sequence[Path], report: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._report, self._limits = report, limits
        self._watched = WatchedFiles(offloaded.engine.store, places)
        self._batcher = Batcher(offloaded, tokenizer, limits, self._watched, report)
        self._service = Service(offloaded.model, tokenizer, self._batcher, limits, names)

    @property
    def served(self) -> Served:
        return self._batcher.served

    def begin(self) -> None:
        """Starts the steps and computes a short text, so that the first request finds kernels compiled, libraries
        loaded and the file of experts in memory."""
        self._batcher.start()
        heard: queue.SimpleQueue[Event] = queue.SimpleQueue()
        if self._limits.context > FIRST_PROMPT + FIRST_TOKENS:
            sampling = Sampling(FIRST_TOKENS, 0.0, None, None, 0)
            self._batcher.submit(RunningText(TextRequest(None, [0] * FIRST_PROMPT, sampling), heard.put))
            while isinstance(heard.get(), Piece):
                pass
        self._batcher.served = Served()

    def run(self, listener: socket.socket, hosts: Sequence[str] | None, ready: Callable[[], None]) -> None:
        """Answers requests until Ctrl-C, SIGTERM or SIGHUP; calls `ready` once it listens. `begin` came before."""
        config = uvicorn.Config(
            application(self._service, self._batcher, self._watched, hosts, self._report),
            http=PatientProtocol, log_level="critical", access_log=False, lifespan="off", ws="none",
            timeout_graceful_shutdown=int(LAST_ANSWERS), backlog=BACKLOG,
            server_header=False,
        )  # fmt: skip
        server = _Server(config, self._batcher, ready, self._report)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again once it has ended
            server.run(sockets=[listener])

    def close(self) -> None:
        """Ends the batcher; the engine may be closed afterwards."""
        self._batcher.stop(_ENDING)
        self._batcher.join(LAST_CALL)
        self._watched.close()


_ENDING = RequestRefusal(UNAVAILABLE, "The server is ending: send the request again later.", code="server_ending")


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that ends, with an answer, if no whole head of a request arrives, or if there are too many.

    uvicorn lets a connection wait for the rest of a head forever, and stops to accept any once all files are open.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False
        if len(self.connections) > most_connections():
            self._end("503 Service Unavailable", f"The server has {most_connections():,} connections: try again later.")
        else:
            self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if not self._ended:  # otherwise it is dropped, because a connection closed with unread data loses its answer
            super().data_received(data)
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        if self._ended or self._answers or self.transport.is_closing():
            self._stop_waiting()
        elif self._timer is None:
            self._timer = self.loop.call_later(PATIENCE, self._late)

    @property
    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if not self._answers and not self.transport.is_closing():
            self._end("408 Request Timeout", f"No request arrived within {PATIENCE:.0f} s.")

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP, in the form of all others."""
        self._end("400 Bad Request", "What arrived is no request of HTTP/1.1.")

    def _end(self, status: str, sentence: str) -> None:
        body = json.dumps(RequestRefusal(int(status[:3]), sentence).to_dict()).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        self._ended = True
        if len(self.connections) > LINGER * most_connections():
            self.transport.close()
        else:
            self.transport.write_eof()
            self.loop.call_later(LAST_READ, self.transport.close)


def most_connections() -> int:
    """Half of the files that the process may open; the rest are the model's and the libraries'."""
    return min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class _Server(uvicorn.Server):
    """uvicorn's server, which answers all open requests as soon as a signal asks for its end."""

    def __init__(
        self, config: uvicorn.Config, batcher: Batcher, ready: Callable[[], None], report: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._batcher, self._ready, self._report = batcher, ready, report
        self._reported = -SILENCE

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self.failed)
        await super().startup(sockets)
        self._ready()

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """As asyncio's, but a sentence, not tracebacks, if connections came faster than they could be refused."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in NO_FILES):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._reported >= SILENCE:
            self._reported = time.monotonic()
            self._report("More connections arrive than the process may open files: the next ones wait for a second.")

    def handle_exit(self, sig: int, frame: FrameType | None) -> Any:
        super().handle_exit(sig, frame)
        self._batcher.stop(_ENDING)

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """As uvicorn's, and SIGHUP, which the end of a terminal sends."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGHUP)
        with super().capture_signals():
            if before not in (signal.SIG_IGN, None):
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)
