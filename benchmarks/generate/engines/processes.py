"""Engines in processes of their own: commands go in as lines, answers come back as lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT = 1800.0  # seconds for an answer


class EngineError(Exception):
    """An engine ended, hangs, or reports an error; the text is one sentence without a full stop."""


class EngineProcess:
    """A running engine. Its first line says that it is ready; `close` ends it."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name, self._log, self._rest = name, log, b""
        self._ready: dict[str, Any] | None = None
        with log.open("wb") as errors:
            self._process = subprocess.Popen(  # in another session, because Ctrl-C is this process's own
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def ready(self) -> dict[str, Any]:
        """The engine's first line."""
        if self._ready is None:
            self._ready = self.answer()
        return self._ready

    def ask(self, verb: str, word: object = "-", ids: Sequence[int] = ()) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        line = " ".join([verb, str(word), *map(str, ids)])
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()
        except OSError:
            raise EngineError(self._ended()) from None
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line of the engine."""
        until = time.monotonic() + LIMIT
        stdout = self._process.stdout
        if stdout is None:
            raise EngineError(f"{self.name} has no output")
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise EngineError(f"{self.name} has not answered for {LIMIT:.0f} s")
                piece = os.read(stdout.fileno(), 1 << 16)
                if not piece:
                    raise EngineError(self._ended())
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            raise EngineError(f"{self.name} printed a line that is not JSON: {line[:80]!r}") from None
        if not isinstance(answer, dict) or "error" in answer:
            raise EngineError(f"{self.name}: {answer.get('error') if isinstance(answer, dict) else answer}")
        return answer

    def memory(self) -> dict[str, int]:
        """Bytes: `resident` now and `peak` so far; empty where the system does not report them."""
        sizes = {}
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
                key, _, value = line.partition(":")
                if key in ("VmRSS", "VmHWM"):
                    sizes["resident" if key == "VmRSS" else "peak"] = 1024 * int(value.split()[0])
        return sizes

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._process.kill()
        self._process.wait()

    def _ended(self) -> str:
        status = self._process.wait()
        with contextlib.suppress(OSError):
            lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        why = f": {lines[-1][:300].rstrip('.')}" if lines else ""
        ended = f"signal {-status}" if status < 0 else f"status {status}"
        more = " (was memory short?)" if status == -9 else ""
        return f"{self.name} ended with {ended}{more}{why}"
