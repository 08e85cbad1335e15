"""Messages between two processes that do not trust one another: a header, JSON, and raw bytes. It loads no torch.

    header   magic | nonce of the session | number of the request | bytes of JSON | bytes behind it

The receiver checks the header and every size before it reads on, and unpickles nothing.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MAGIC = b"GSM1"
NONCE_BYTES = 16
_HEADER = struct.Struct(f"!4s{NONCE_BYTES}sQQQ")
JSON_LIMIT = 64 << 20  # bytes of JSON in one message
_PIECE = 1 << 20
_TICK = 0.05  # seconds


class Malformed(Exception):
    """A message that breaks the protocol."""


class Forged(Malformed):
    """A message that has the right form and the wrong nonce, or answers a request that is not open."""


class Closed(Exception):
    """The other end closed the connection."""


@dataclass
class Connection:
    """One end of a private socket; `limit`: bytes that may follow the JSON of one message."""

    socket: socket.socket
    nonce: bytes
    limit: int = 4 << 30
    waited: Callable[[], None] = field(default=lambda: None)  # called every now and then while nothing comes
    beside: int = -1  # a file descriptor that `waited` reads

    def send(self, number: int, message: object, pieces: Sequence[memoryview] = ()) -> None:
        """Sends JSON, and bytes behind it; raises Closed if nobody reads it."""
        text, size = json.dumps(message).encode(), sum(len(p) for p in pieces)
        try:
            self.socket.setblocking(True)
            self.socket.sendall(_HEADER.pack(MAGIC, self.nonce, number, len(text), size) + text)
            for piece in pieces:
                if len(piece):
                    self.socket.sendall(piece)
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self, until: float | None = None) -> tuple[int, Any, bytearray]:
        """(number, JSON, bytes) of the next message.

        Raises Closed, Malformed, or TimeoutError after time.monotonic() `until`.
        """
        magic, nonce, number, json_bytes, other_bytes = _HEADER.unpack(self._read(_HEADER.size, until))
        if magic != MAGIC:
            raise Malformed(f"bytes that are no message: {magic!r}")
        if nonce != self.nonce:
            raise Forged("a message with the nonce of no request")
        if json_bytes > JSON_LIMIT or other_bytes > self.limit:
            raise Malformed(f"a message of {json_bytes + other_bytes} bytes, which is beyond the limit")
        try:
            message = json.loads(bytes(self._read(json_bytes, until)).decode())
        except (ValueError, RecursionError) as error:
            raise Malformed(f"a message that is no JSON ({type(error).__name__})") from error
        return number, message, self._read(other_bytes, until)

    def _read(self, size: int, until: float | None) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            self._wait(until)
            try:
                count = self.socket.recv_into(view[done : done + _PIECE])
            except OSError as error:
                raise Closed(str(error)) from error
            if count == 0:
                raise Closed("the connection was closed")
            done += count
        return data

    def _wait(self, until: float | None) -> None:
        """Waits until bytes are there; meanwhile `waited` is called, and at once if its own file has something."""
        while True:
            files: list[Any] = [self.socket, *([self.beside] if self.beside >= 0 else [])]
            try:
                ready = select.select(files, [], [], _TICK)[0]
            except (OSError, ValueError) as error:
                raise Closed(str(error)) from error
            if until is not None and time.monotonic() > until:
                raise TimeoutError
            if self.socket in ready:
                return
            self.waited()

    def pending(self) -> bool:
        """Whether bytes wait that nobody asked for."""
        return bool(select.select([self.socket], [], [], 0)[0])
