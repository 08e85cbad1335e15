"""Output to the terminal: results on stdout, everything else on stderr, each error in one paragraph."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import IO, Any, ParamSpec, TextIO, TypeVar, cast

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

P = ParamSpec("P")
T = TypeVar("T")
USAGE = 2  # exit status: the command could not run
INTERRUPTED = 130  # exit status after Ctrl-C
LONGEST = 1e7  # seconds that an option takes
INTERRUPTED_EARLY = "Interrupted before there was any result"


class Failure(Exception):
    """A mistake that the user can fix; the text is one paragraph for stderr."""

    status = USAGE


class Interruption(Failure):
    """Ctrl-C, SIGTERM or SIGHUP before there was a result."""

    status = INTERRUPTED


def within(least: float, most: float = LONGEST) -> Callable[[float | None], float | None]:
    """A callback for an option with these bounds, whose sentence also fits NaN."""

    def checked(value: float | None) -> float | None:
        if value is not None and not least <= value <= most:
            raise typer.BadParameter(f"expected a number from {least:g} to {most:.10g}, got {value:g}")
        return value

    return checked


def in_a_paragraph(command: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a command: prints a `Failure` as one paragraph, without a traceback, and exits with its status."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except Failure as problem:
            print_paragraph(str(problem))
            raise typer.Exit(problem.status) from None

    return wrapped


def print_paragraph(text: str) -> None:
    """Print one paragraph to stderr, folded at the terminal's width, or at 100 columns if that is narrower."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    # a long name (a path, say) may overflow its line, but is never cut
    typer.echo(textwrap.fill(visible(text), width, break_long_words=False, break_on_hyphens=False), err=True)


def announce(text: str) -> None:
    """Print the first line of a command to stderr, before the imports that take seconds."""
    _write_stderr(f"{visible(text)}\n")


@contextlib.contextmanager
def loading_torch() -> Iterator[None]:
    """Show "Loading torch" on stderr while the block imports it. On a terminal the line disappears afterwards.

    Garbage is not collected meanwhile: there is none, and the collector takes a sixth of the time to see that.
    """
    loaded = sys.modules.get("torch") is not None
    text = "Loading torch" if not loaded and is_first() else ""
    passing = bool(text) and sys.stderr is not None and sys.stderr.isatty()
    _write_stderr(text if passing or not text else f"{text}\n")
    if not loaded:
        gc.disable()
    try:
        yield
    finally:
        if not loaded:
            gc.freeze()
            gc.enable()
        if passing:
            _write_stderr(f"\r{' ' * len(text)}\r")


def is_first() -> bool:
    """Whether this process is the only one, or the first of those that torchrun started."""
    return os.environ.get("WORLD_SIZE", "1").strip() in ("", "1") or os.environ.get("RANK", "0").strip() == "0"


def _write_stderr(text: str) -> None:
    with contextlib.suppress(OSError):
        if sys.stderr is not None:  # it is None if the shell closed it
            sys.stderr.write(text)
            sys.stderr.flush()


def visible(text: str) -> str:
    """`text` with control characters escaped: a message may quote what a user's module raised."""
    if all(c.isprintable() or c in "\t\n" for c in text):
        return text
    from ..assay.support import printable as escaping  # rarely needed, and it loads torch

    return escaping.visible(text)


def write_stdout(text: str) -> None:
    """Write text to stdout and flush. Raises Failure if that fails, and BrokenPipeError if the reader has gone."""
    if sys.stdout is None:
        raise Failure("stdout is closed: nothing can be written to it.")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # gives Python's own flush at exit a place to write to
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise Failure(f"stdout cannot be written to: {error.strerror or error}.") from error


def write_json(result: object) -> None:
    """Write one line of JSON to stdout; does nothing if the reader has gone."""
    with contextlib.suppress(BrokenPipeError):
        write_stdout(json.dumps(result) + "\n")


_BLANKS = re.compile(r" +$", re.MULTILINE)


class _LastingStream:
    """stdout or stderr for a console: if it cannot be written to, the command goes on without it.

    In a file or pipe, lines have no blanks at their ends.

    The first failure of stdout is reported on stderr, unless the reader has gone.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._plain = stream, not stream.isatty()

    def write(self, text: str) -> int:
        if self._plain:  # rich fills lines up to the width, which only a terminal needs
            text = _BLANKS.sub("", text)
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        with contextlib.suppress(OSError, ValueError):  # Python's own flush at exit goes there, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if self._stream is not sys.stderr and not isinstance(error, BrokenPipeError):
            print_paragraph(f"stdout cannot be written to: {error.strerror or error}.")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console(*, stderr: bool = False) -> Console:
    """A rich console; in a file or pipe it writes plain text, 100 columns wide, so that tables keep their shape."""
    stream = sys.stderr if stderr else sys.stdout
    if stream is None:  # the shell closed it
        stream = open(os.devnull, "w", encoding="utf-8")
    width = None if stream.isatty() else 100
    file = cast("IO[str]", _LastingStream(stream))
    return Console(file=file, stderr=stderr, highlight=False, width=width, soft_wrap=False)


class WholeTable(Table):
    """A table that cuts no cell: on a terminal that is too narrow, each row becomes its labels, and pairs below them.

    labels  how many of the first columns label a row
    """

    def __init__(self, *, labels: int, title: str | None = None) -> None:
        super().__init__(
            title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False,
            header_style="dim",
        )  # fmt: skip
        self.labels = labels

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.__rich_measure__(console, options.update(width=100_000)).maximum <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if isinstance(self.title, str):
            yield Text.from_markup(self.title, style="bold")
        headers = [_marked(column.header) for column in self.columns[self.labels :]]
        label = [Text()] * self.labels
        for cells in zip(*([_marked(cell) for cell in column.cells] for column in self.columns), strict=True):
            label = [cell or above for cell, above in zip(cells, label, strict=False)]
            yield Text("  ").join(label)
            pairs = zip(headers, cells[self.labels :], strict=True)
            text = Text(", ").join(Text.assemble((name.plain, "dim"), " ", cell) for name, cell in pairs if cell)
            for line in text.wrap(console, options.max_width - 2):
                yield Text.assemble("  ", line)


def _marked(cell: object) -> Text:
    return cell if isinstance(cell, Text) else Text.from_markup(str(cell))


def duration(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def size(number: int) -> str:
    """Bytes in the largest binary unit that fits: 4.5 MiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number:,} B"


def percent(share: float) -> str:
    """Three figures: 31.5 %, 100 %."""
    return f"{100 * share:.3g} %"


def count(n: int, word: str) -> str:
    return f"{n:,} {word}{'' if n == 1 else 's'}"
