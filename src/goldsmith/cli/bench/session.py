"""One run of a benchmark: its conditions, the file and the screen of its rows, and its exit status."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

import torch
from rich.console import Console
from rich.markup import escape

from ..output_files import check_file
from ..signals import terminate_like_ctrl_c
from ..terminal import INTERRUPTED, Failure, console
from .rows import Conditions, load

BUSY = 1.5  # load average above which the machine counts as busy


class JsonRow(Protocol):
    """What a row has in common with all others. verified: False where the result is wrong."""

    @property
    def verified(self) -> bool | None: ...

    def to_json(self) -> dict[str, object]: ...


@dataclass
class Session:
    """Writes rows as they come. `shown` counts the rows that a table has shown; `status` is the exit status so far.

    load   the load average before the run, which is the work of others
    """

    conditions: Conditions
    out: str | None
    err: Console
    stream: Console
    load: float | None
    shown: int = 0
    status: int = 0
    _target: IO[str] | None = field(default=None, repr=False)

    def write(self, rows: Sequence[JsonRow]) -> None:
        """Append rows to the file. After an error, the next rows are still measured and shown."""
        self.status = max([self.status, *(int(row.verified is False) for row in rows)])
        if self._target is None:
            return
        try:
            self._target.write("".join(json.dumps(row.to_json()) + "\n" for row in rows))
            self._target.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            why = error.strerror or error
            self.err.print(
                f"[yellow]Cannot write {escape(str(self.out))}: {why}. From here on the rows are only printed.[/]"
            )
            self._target = None

    def warn_if_busy(self) -> None:
        if self.load is not None and self.load > BUSY:
            self.err.print(
                f"[yellow]Others use this machine (load {self.load:.1f}): all figures are of a busy machine.[/]"
            )

    def end(self, legend: str) -> int:
        """Explain the tables, if there were any; returns the exit status."""
        if self.shown:
            self.stream.print(legend)
        return self.status or (0 if self.shown else 2)


@contextlib.contextmanager
def session(device: str, out: str | None, commit: str) -> Iterator[Session]:
    """Print the conditions and open the file; an interrupt ends the block and keeps the rows so far."""
    err, target = console(stderr=True), open_rows(out)
    stream = console() if out != "-" else err
    run = Session(Conditions.here(device, commit), out, err, stream, load(), _target=target)
    stream.print(f"[dim]{run.conditions}[/]", soft_wrap=True)
    try:
        with terminate_like_ctrl_c():
            yield run
    except KeyboardInterrupt:
        err.print("[yellow]Interrupted: the rows so far are kept.[/]")
        run.status = INTERRUPTED
    finally:
        if target is not None and target is not sys.stdout:
            with contextlib.suppress(OSError):  # a full disk, which was reported with its row
                target.close()


def device_name(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise Failure(f"--device {name}: not a device; use cpu, cuda or cuda:1.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise Failure(f"--device {name}: this machine has no CUDA device that torch can use.")
    return name


def open_rows(out: str | None) -> IO[str] | None:
    if out is None:
        return None
    if out == "-":
        return sys.stdout
    check_file(Path(out))
    try:
        return open(out, "a", encoding="utf-8")
    except OSError as error:
        raise Failure(f"cannot write {out}: {error.strerror or error}.") from error
