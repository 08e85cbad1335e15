"""What a run shows: the accounting before it, a bar or lines while it trains, and where everything is after it."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from ..say import count, duration

if TYPE_CHECKING:
    from ...hf.training.records.journal import LogRow

NOTHING = "Interrupted before the first step was done; nothing was trained."
LINES = 10  # about so many lines of progress in a log that is no terminal


class Shown:
    """Progress and notes to `err`, tables and the end to `out`."""

    def __init__(self, err: Console, out: Console):
        self.err, self.out = err, out
        self.training = False
        self._progress: Progress | None = None
        self._steps = self._first = self._last = 0
        self._began = self._told = 0.0

    def note(self, text: str) -> None:
        self.err.print(f"[yellow]{_plain(folded(text))}[/]", soft_wrap=True)

    def failed(self, text: str) -> None:
        self.err.print(f"[red]{_plain(folded(text))}[/]", soft_wrap=True)

    @contextmanager
    def doing(self, what: str) -> Iterator[Callable[[int, int, str], None]]:
        """A word on what takes long before the first step; yields what is told of a part (done, all, name)."""
        if not self.err.is_terminal:
            yield lambda done, total, name: None
            return
        with self.err.status(what) as status:
            yield lambda done, total, name: status.update(f"{what}: experts {done} of {total}")

    # before

    def data(self, said: dict[str, Any], plan: Any, rows: int) -> None:
        a_step = f"{plan.batch_size} x {plan.grad_accum}" if plan.grad_accum > 1 else f"{plan.batch_size}"
        text = (
            f"{said['file']}: {count(said['documents'], 'document')}, {count(said['tokens'], 'token')}, of which "
            f"{said['trained_tokens']:,} count, in {count(rows, 'row')}; "
            f"{count(plan.steps, 'step')} of {a_step} rows"
        )
        self.out.print(folded(text), markup=False, soft_wrap=True)

    def accounting(self, found: Any, options: Any) -> None:
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("trained parameters")
        table.add_column("", justify="right")
        for name, number in found.expert_lora.items():
            table.add_row(f"expert LoRA, {name}", f"{number:,}")
        for name in ("attention_lora", "router", "other"):
            if found.trained[name] or name == "attention_lora":
                table.add_row(name.replace("_lora", " LoRA"), f"{found.trained[name]:,}")
        table.add_row("all, as in the optimizer", f"{found.trained['total']:,}", style="bold")
        self.out.print(table)
        self.out.print()
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("memory")
        table.add_column("", justify="right")
        for name, number in (
            (f"experts, {found.format}", found.experts),
            ("other frozen weights", found.frozen),
            ("trained parameters", found.lora),
            ("gradients and optimizer", found.optimizer),
            (f"activations, {options.batch_size} x {options.seq_len:,} tokens (about)", found.activations),
        ):
            table.add_row(name, size(number))
        table.add_row("free now, with the model loaded", size(found.free), style="dim")
        self.out.print(table)
        self._propose(found, options)

    def _propose(self, found: Any, options: Any) -> None:
        now = (options.batch_size, options.grad_accum)
        if found.proposal is None and found.would_fit_alone(options.batch_size):
            self.note(
                f"Gradients and optimizer of {found.trained['total']:,} trained parameters leave no room for a row in "
                "what is free; a smaller --rank or fewer --targets take less."
            )
        elif found.proposal is None:
            self.note(
                f"One row of {options.seq_len:,} tokens does not fit into what is free; "
                "--checkpointing, a smaller --seq-len or --format int4 make room."
            )
        elif found.proposal[0] < now[0]:
            self.note(
                f"A batch of {now[0]} rows does not fit into what is free: take --batch-size {found.proposal[0]} "
                f"--grad-accum {found.proposal[1]}, which has the same result but for rounding."
            )
        elif found.proposal[0] > now[0]:
            text = (
                f"Memory allows --batch-size {found.proposal[0]} --grad-accum {found.proposal[1]}: as many rows a "
                "step, and each expert's weights are read less often."
            )
            self.out.print(f"[dim]{folded(text)}[/]", soft_wrap=True)

    # while it trains

    def begins(self, steps: int, done: int) -> None:
        if done > steps:
            self.note(
                f"{count(done, 'step')} are done already, and {steps:,} were asked for: nothing is left to train, and "
                f"the adapter is that of step {done:,}."
            )
        elif done == steps:
            self.note(f"All {steps:,} steps are done already.")
        elif done:
            self.note(f"Goes on after step {done:,} of {steps:,}.")

    @contextmanager
    def progress(self, steps: int, done: int) -> Iterator[None]:
        self._steps, self._first, self._last, self._began = steps, done, done, time.monotonic()
        self.training = True
        try:
            if not self.err.is_terminal:
                yield
                return
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[said]}"),
                console=self.err,
                transient=True,
            )
            with self._progress:
                self._progress.add_task("", total=steps, completed=done, said="")
                yield
        finally:
            self.training = False
            self._progress = None

    def row(self, row: LogRow) -> None:
        """A row of the log, shown as it comes, or about every tenth."""
        if "loss" not in row:
            self._say(f"step {row['step']:,}: loss on held-out text {row['eval_loss']:.4f}")
            return
        self._last = row["step"]
        done = self._last - self._first
        left = (time.monotonic() - self._began) / max(1, done) * (self._steps - self._last)
        said = f"loss {row['loss']:.4f}, {row['tokens_per_s']:,.0f} tokens/s, {duration(left)} left"
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self._last, said=said)
        elif done == 1 or self._last == self._steps or self._last % max(1, self._steps // LINES) == 0:
            self._say(f"step {self._last:,} of {self._steps:,}: {said}")

    def stopped(self, again: str) -> None:
        """Interrupted at once, in the middle of something; `again` is the command that goes on."""
        how = f"Stopped at once; {again} goes on from the last checkpoint." if self._steps else NOTHING
        self.note(how)

    def _say(self, text: str) -> None:
        self.err.print(f"[dim]{text}[/]", soft_wrap=True)

    # after

    def ended(self, result: dict[str, Any], steps: int, output: Path, again: str) -> None:
        if not result["step"]:
            self.note(NOTHING)
            return
        for name, words in (("loss", "loss"), ("eval_loss", "loss on held-out text")):
            if result[name]:
                self.out.print(f"{words} {result[name]['first']:.4f} -> {result[name]['last']:.4f}")
        for word, name in (("adapter", "adapter_model.safetensors"), ("page", "loss.html"), ("log", "log.jsonl")):
            self.out.print(f"{word:8}{output / name}", markup=False, soft_wrap=True)
        if result["status"] == "interrupted":
            command = again[0].upper() + again[1:]
            self.note(f"Stopped after step {result['step']:,} of {steps:,}. {command} goes on from there.")


def size(number: int) -> str:
    """Bytes for a reader."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number:,} B"


def folded(text: str) -> str:
    """Lines of the terminal's width, or of COLUMNS, at most 100; a path is never cut."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
