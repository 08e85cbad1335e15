"""Output of `goldsmith finetune`: parameters and memory before a run, progress, and the files written."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from ..terminal import INTERRUPTED_EARLY, count, duration, percent, size

if TYPE_CHECKING:
    from ...hf.training.model.accounting import Accounting
    from ...hf.training.options import Options
    from ...hf.training.records.journal import LogRow
    from ...hf.training.run.training_steps import TrainingSteps
    from .record import DataFacts, RunResult

LINES = 10  # progress lines without a terminal, roughly


class FinetuneDisplay:
    """Prints progress and notes to `err`, tables and the result to `out`."""

    def __init__(self, err: Console, out: Console):
        self.err, self.out = err, out
        self.training = False
        self._progress: Progress | None = None
        self._steps = self._first = self._last = 0
        self._began = 0.0

    def note(self, text: str) -> None:
        self.err.print(f"[yellow]{_plain(folded(text))}[/]", soft_wrap=True)

    def failed(self, text: str) -> None:
        self.err.print(f"[red]{_plain(folded(text))}[/]", soft_wrap=True)

    @contextmanager
    def doing(self, task: str) -> Iterator[Callable[[int, int, str], None]]:
        """On a terminal, show the status of a slow task before training; yields a callback (done, total, name)."""
        if not self.err.is_terminal:
            yield lambda done, total, name: None
            return
        with self.err.status(task) as status:
            yield lambda done, total, name: status.update(f"{task}: experts {done} of {total}")

    # before

    def data(self, data: DataFacts, training: TrainingSteps, rows: int) -> None:
        rows_of_a_step = count(training.batch_size, "row")
        if training.grad_accum > 1:
            rows_of_a_step = f"{training.batch_size} x {training.grad_accum} rows"
        on_ranks = f" on each of {training.ranks} ranks" if training.ranks > 1 else ""
        text = (
            f"{data['file']}: {count(data['documents'], 'document')}, {count(data['tokens'], 'token')}, "
            f"{data['trained_tokens']:,} of them trained on, in {count(rows, 'row')}; "
            f"{count(training.steps, 'step')} of {rows_of_a_step}{on_ranks}"
        )
        self.out.print(folded(text), markup=False, soft_wrap=True)

    def accounting(self, accounting: Accounting, options: Options) -> None:
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("trained parameters")
        table.add_column("", justify="right")
        for name, number in accounting.expert_lora.items():
            table.add_row(f"expert LoRA, {name}", f"{number:,}")
        for name in ("attention_lora", "router", "other"):
            if accounting.trained[name] or name == "attention_lora":
                table.add_row(name.replace("_lora", " LoRA"), f"{accounting.trained[name]:,}")
        table.add_row("total in the optimizer", f"{accounting.trained['total']:,}", style="bold")
        self.out.print(table)
        self.out.print()
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("memory")
        table.add_column("", justify="right")
        for name, number in (
            (f"experts, {accounting.format}", accounting.experts),
            ("other frozen weights", accounting.frozen),
            ("trained parameters", accounting.lora),
            ("gradients and optimizer", accounting.optimizer),
            (f"activations, {options.batch_size} x {options.seq_len:,} tokens (about)", accounting.activations),
        ):
            table.add_row(name, size(number))
        table.add_row("free now, with the model loaded", size(accounting.free), style="dim")
        self.out.print(table)
        self._propose(accounting, options)

    def _propose(self, accounting: Accounting, options: Options) -> None:
        now = (options.batch_size, options.grad_accum)
        if accounting.proposal is None and accounting.would_fit_alone(options.batch_size):
            self.note(
                f"Gradients and optimizer of {accounting.trained['total']:,} trained parameters leave too little "
                "memory for one row; use a smaller --rank or fewer --targets."
            )
        elif accounting.proposal is None:
            self.note(
                f"One row of {options.seq_len:,} tokens does not fit into the free memory; "
                "use --checkpointing, a smaller --seq-len or --format int4."
            )
        elif accounting.proposal[0] < now[0]:
            self.note(
                f"A batch of {now[0]} rows does not fit into the free memory: use --batch-size "
                f"{accounting.proposal[0]} --grad-accum {accounting.proposal[1]}, which gives the same result "
                "up to rounding."
            )
        elif accounting.proposal[0] > now[0]:
            text = (
                f"--batch-size {accounting.proposal[0]} --grad-accum {accounting.proposal[1]} would also fit: the same "
                "rows per step, but each expert's weights are read less often."
            )
            self.out.print(f"[dim]{folded(text)}[/]", soft_wrap=True)

    # while it trains

    def begins(self, steps: int, done: int) -> None:
        if done > steps:
            self.note(
                f"{count(done, 'step')} are done already, and only {steps:,} were requested: no step is left, "
                f"and the adapter stays that of step {done:,}."
            )
        elif done == steps:
            self.note(f"All {steps:,} steps are done already.")
        elif done:
            self.note(f"Resuming after step {done:,} of {steps:,}.")

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
                TextColumn("{task.fields[text]}"),
                console=self.err,
                transient=True,
            )
            with self._progress:
                self._progress.add_task("", total=steps, completed=done, text="")
                yield
        finally:
            self.training = False
            self._progress = None

    def row(self, row: LogRow) -> None:
        """Show a row of the log. Without a terminal, print only about LINES rows of the whole run."""
        if "loss" not in row:
            text = f"step {row['step']:,}: held-out loss {row['eval_loss']:.4f}"
            accuracy = row.get("eval_mean_token_accuracy")
            if accuracy is not None:
                text += f", perplexity {row['eval_perplexity']:.2f}, token accuracy {percent(accuracy)}"
            self._print(text)
            return
        self._last = row["step"]
        done = self._last - self._first
        left = (time.monotonic() - self._began) / max(1, done) * (self._steps - self._last)
        text = f"loss {row['loss']:.4f}, {row['tokens_per_s']:,.0f} tokens/s, {duration(left)} left"
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self._last, text=text)
        elif done == 1 or self._last == self._steps or self._last % max(1, self._steps // LINES) == 0:
            self._print(f"step {self._last:,} of {self._steps:,}: {text}")

    def stopped(self, again: str) -> None:
        """Report that the run stopped in the middle of a step; `again` names the command that resumes it."""
        text = f"Stopped at once; {again} resumes from the last checkpoint." if self._steps else f"{INTERRUPTED_EARLY}."
        self.note(text)

    def _print(self, text: str) -> None:
        self.err.print(f"[dim]{text}[/]", soft_wrap=True)

    # after

    def ended(self, result: RunResult, steps: int, output: Path, again: str, lost: Collection[str] = ()) -> None:
        if not result["step"]:
            self.note(f"{INTERRUPTED_EARLY}.")
            return
        for words, ends, form in (
            ("held-out loss", result["eval_loss"], "{:.4f}".format),
            ("held-out perplexity", result.get("eval_perplexity"), "{:.2f}".format),
            ("held-out token accuracy", result.get("eval_mean_token_accuracy"), percent),
        ):
            if ends:
                self.out.print(f"{words} {form(ends['first'])} -> {form(ends['last'])}")
        if loss := result["loss"]:
            steps_compared = f"means of {loss['steps']} steps" if loss["steps"] > 1 else "the first and the last step"
            self.out.print(f"training loss {loss['first']:.4f} -> {loss['last']:.4f} ({steps_compared})")
        files = (("adapter", "adapter_model.safetensors"), ("page", "loss.html"), ("log", "log.jsonl"))
        for word, name in [file for file in files if file[1] not in lost]:
            self.out.print(f"{word:8}{output / name}", markup=False, soft_wrap=True)
        if result["status"] == "interrupted":
            command = again[0].upper() + again[1:]
            self.note(f"Stopped after step {result['step']:,} of {steps:,}. {command} resumes from there.")


def folded(text: str) -> str:
    """`text` wrapped at the width of the terminal (or COLUMNS), at most 100 columns; words are never broken."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
