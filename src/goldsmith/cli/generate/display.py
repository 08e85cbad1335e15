"""Output of `goldsmith generate`: progress while the store is built, the text as it grows, statistics on stderr."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..terminal import INTERRUPTED_EARLY, duration, percent, size, write_stdout

if TYPE_CHECKING:
    from ...hf.offload.generation import Generation
    from ...hf.offload.memory_needs import MemoryNeeds
    from ...offload.memory.host_memory import ProcessMemory
    from ..json_types import JsonObject

LINES = 10.0  # seconds between lines of progress in a log file


class GenerateDisplay:
    """Prints the text to stdout and everything else to `err`."""

    def __init__(self, err: Console, *, stream: bool | None, as_json: bool):
        self.err, self.as_json = err, as_json
        self.stream = not as_json if stream is None else stream

    def note(self, text: str) -> None:
        self.err.print(f"[yellow]{escape(text)}[/]", soft_wrap=True)

    def failed(self, text: str) -> None:
        self.err.print(f"[red]{escape(text)}[/]", soft_wrap=True)

    def interrupted(self, there_is_text: bool) -> None:
        self.note("Interrupted." if there_is_text else f"{INTERRUPTED_EARLY}.")

    @contextmanager
    def doing(self, task: str) -> Iterator[Callable[[int, int | None, str], None]]:
        """Show progress of a long task; yields a callback (bytes done, total bytes or None, part)."""
        if not self.err.is_terminal:
            yield ProgressLines(self.err).update
            return
        with Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), ByteCount(binary_units=True),
            TimeRemainingColumn(), console=self.err, transient=True,
        ) as bar:  # fmt: skip
            number = bar.add_task(task, total=None)

            def update(done: int, total: int | None, part: str) -> None:
                bar.update(number, description=escape(part or task), completed=done, total=total)

            yield update

    @contextmanager
    def text(self, prompts: Sequence[str], adapter: str | None = None) -> Iterator[Callable[[int, str], None]]:
        """Yields a callback (row, piece); prints the first row as it grows, then the others whole, in order.

        adapter: its name is printed above the text; None if there is only one adapter.
        """
        if self.as_json:
            yield lambda row, piece: None
            return
        if adapter is not None:
            write_stdout(f"=== {adapter}\n")
        page = BatchText(len(prompts), live=self.stream)
        try:
            yield page.add
        finally:
            page.end()

    def needs(self, needs: MemoryNeeds, tokens: int, prompt: int) -> None:
        """What the command will take, before anything is read."""
        for number, line in enumerate(textwrap.wrap(needs_text(needs, tokens, prompt), 56, break_on_hyphens=False)):
            self.err.print(f"{'' if number else 'needs':23} {line}", soft_wrap=True, markup=False)

    def stats(self, generation: Generation, stats: JsonObject, explanation: str) -> None:
        """Print the statistics of a run, and what would make it faster."""
        from ...offload.memory.host_memory import process_memory

        rows = [("tokens", f"{generation.tokens:,} in {duration(generation.seconds)}")]
        if generation.first_token is not None:
            rows.append(("time to first token", f"{generation.first_token:.3f} s"))
        if generation.tokens_per_s is not None:
            rows.append(("tokens per second", f"{generation.tokens_per_s:.1f}"))
        experts = {lane: cast("int", stats.get(f"experts_{lane}", 0)) for lane in ("cpu", "copied", "cached")}
        rows.append(("experts by lane", ", ".join(f"{lane} {number:,}" for lane, number in experts.items())))
        cache = experts["cached"] or stats.get("uploads")
        rows.append(("hit rate", _share(_number(stats, "hit_rate")) if cache else "- (nothing was in the cache)"))
        rows.append(("bytes to the GPU, back", f"{_bytes(stats, 'bytes_h2d')}, {_bytes(stats, 'bytes_d2h')}"))
        rows.append(("bytes read from store", _bytes(stats, "bytes_store_read")))
        rows.append(("of predicted speed", _share(_number(stats, "bound_share"))))
        rows.append(("limiting lane", str(stats.get("limiting") or "none")))
        rows.append(("memory", memory_text(process_memory())))
        for name, value in rows:
            self.err.print(f"{name:23} {value}", soft_wrap=True, markup=False)
        self.err.print(explanation, soft_wrap=True, markup=False)


def needs_text(needs: MemoryNeeds, tokens: int, prompt: int) -> str:
    """Memory as a sentence: what a model will take, with this many cached tokens, and tokens in a prompt's call."""
    return (
        f"{size(needs.dense)} for all but the experts, {size(tokens * needs.token)} for keys and values, "
        f"{size(prompt * needs.prompt)} for a prompt, {size(needs.program)} for the program, "
        f"and a store of about {size(needs.store)} that processes share; "
        f"available: {size(needs.available)}"
    )


def memory_text(memory: ProcessMemory) -> str:
    """Memory as measured."""
    return f"{size(memory.own)} of its own and {size(memory.files)} of files in memory"


class ByteCount(DownloadColumn):
    """A column with the bytes done and the total; empty for a task without bytes."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total is not None or task.completed else Text()


class ProgressLines:
    """Progress for a log file: a line every LINES seconds."""

    def __init__(self, err: Console):
        self._err, self._last = err, time.monotonic()

    def update(self, done: int, total: int | None, part: str) -> None:
        if time.monotonic() - self._last >= LINES:
            self._last = time.monotonic()
            of = f" of {size(total)}" if total else ""
            self._err.print(f"{part}: {size(done)}{of}", soft_wrap=True, markup=False)


class BatchText:
    """The texts of a batch on stdout, one after another; several texts are numbered."""

    def __init__(self, rows: int, *, live: bool):
        self._texts = [""] * rows
        self._live = live
        if live:
            self._head(0)

    def add(self, row: int, piece: str) -> None:
        self._texts[row] += piece
        if row == 0 and self._live:
            self._write(piece)

    def end(self) -> None:
        for row, text in enumerate(self._texts):
            if row or not self._live:
                self._head(row)
                self._write(text)
            self._write("\n")

    def _head(self, row: int) -> None:
        if len(self._texts) > 1:
            self._write(f"--- {row + 1} of {len(self._texts)}\n")

    def _write(self, text: str) -> None:
        write_stdout(text)


def _number(stats: JsonObject, name: str) -> float | None:
    return cast("float | None", stats.get(name))


def _bytes(stats: JsonObject, name: str) -> str:
    number = cast("int | None", stats.get(name))
    return "-" if number is None else size(number)


def _share(value: float | None) -> str:
    return "-" if value is None else percent(value)
