"""ModelServer: the batcher and the HTTP server of one offloaded model, from the start to the last answer."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from ...offload.attach import Offloaded
from ..model_types import Tokenizer
from .application import application
from .batcher import Batcher, Served, ServingLimits
from .refusals import UNAVAILABLE, RequestRefusal
from .service import Service
from .watched_files import WatchedFiles

LAST_ANSWERS = 3.0  # seconds in which open connections get the rest of their answers
LAST_CALL = 20.0  # seconds for the model's call under way to end at its next layer
BACKLOG = 128


class ModelServer:
    """Serves an offloaded model. names: {name in requests: adapter or None}; places: folders whose files are watched;
    report: gets a sentence about each failure."""

    def __init__(
        self, offloaded: Offloaded, tokenizer: Tokenizer, limits: ServingLimits, names: Mapping[str, str | None],
        places: Sequence[Path], report: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._report = report
        self._watched = WatchedFiles(offloaded.engine.store, places)
        self._batcher = Batcher(offloaded, tokenizer, limits, self._watched, report)
        self._service = Service(offloaded.model, tokenizer, self._batcher, limits, names)

    @property
    def served(self) -> Served:
        return self._batcher.served

    def run(self, listener: socket.socket, hosts: Sequence[str] | None, ready: Callable[[], None]) -> None:
        """Answers requests until Ctrl-C, SIGTERM or SIGHUP; calls `ready` once it listens."""
        config = uvicorn.Config(
            application(self._service, self._batcher, self._watched, hosts, self._report),
            log_level="critical", access_log=False, lifespan="off", ws="none",
            timeout_graceful_shutdown=int(LAST_ANSWERS), backlog=BACKLOG,
            server_header=False,
        )  # fmt: skip
        self._batcher.start()
        server = _Server(config, self._batcher, ready)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again once it has ended
            server.run(sockets=[listener])

    def close(self) -> None:
        """Ends the batcher; the engine may be closed afterwards."""
        self._batcher.stop(_ENDING)
        self._batcher.join(LAST_CALL)
        self._watched.close()


_ENDING = RequestRefusal(UNAVAILABLE, "The server is ending: send the request again later.", code="server_ending")


class _Server(uvicorn.Server):
    """uvicorn's server, which answers all open requests as soon as a signal asks for its end."""

    def __init__(self, config: uvicorn.Config, batcher: Batcher, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._batcher, self._ready = batcher, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

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
