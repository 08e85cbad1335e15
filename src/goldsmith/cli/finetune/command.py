"""`goldsmith finetune`: one training run, from the command-line options to the adapter."""

from __future__ import annotations

import contextlib
import importlib
import json
import platform
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...core.json_values import parse_json
from ..notes import warnings_as_notes
from ..signals import handle_signals, loading_hf
from ..terminal import Failure, announce, console, count, is_first, write_json
from .display import FinetuneDisplay
from .ranks import on_ranks, silent_display
from .record import LOG, PAGE, RUN, Record, result_of

if TYPE_CHECKING:
    from ...hf.model_types import Tokenizer
    from ...hf.training.data.packing import RowStream
    from ...hf.training.model.accounting import Accounting
    from ...hf.training.model.loading import LoadedModel
    from ...hf.training.options import Options
    from ...hf.training.ranks.one_process import OneProcess
    from ...hf.training.records.journal import LogRow
    from ...hf.training.records.trackers import RunTrackers
    from ...hf.training.run.session import TrainingSession
    from ...hf.training.run.trainer import Trainer
    from ...hf.training.run.training_steps import TrainingSteps
    from .record import DataFacts

DIVERGED, INTERRUPTED = 1, 130


def run(arguments: Mapping[str, object], *, dry_run: bool, as_json: bool) -> int:
    """Run the command and return its exit status."""
    if is_first():
        announce(f"Loading torch and transformers, then {Path(str(arguments['model'])).name}")
    with loading_hf():
        importlib.import_module("goldsmith.hf.training.model.loading")  # brings the rest of transformers
        from ...hf.training.errors import TrainingError
        from ...hf.training.ranks.group import Ranks, join

        try:
            ranks = join()
        except TrainingError as error:
            raise Failure(str(error)) from error
    if isinstance(ranks, Ranks):
        return on_ranks(ranks, lambda: _run(arguments, ranks, dry_run=dry_run, as_json=as_json))
    return _run(arguments, ranks, dry_run=dry_run, as_json=as_json)


def _run(arguments: Mapping[str, object], ranks: OneProcess, *, dry_run: bool, as_json: bool) -> int:
    from ...core.device import BackendUnavailable
    from ...hf.checkpoint.foreign_errors import ModelError, of_the_model, out_of_memory
    from ...hf.training.errors import Diverged, TrainingError
    from ...hf.training.options import Options
    from ...hf.training.run.memory_errors import paragraph
    from ...hf.training.run.session import again

    show = silent_display()
    if ranks.first:
        show = FinetuneDisplay(console(stderr=True), console(stderr=True) if as_json else console())
    interrupt = Interrupt(show)
    result: dict[str, object] = {}
    try:
        with handle_signals(interrupt.receive, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            options = Options(**cast("dict[str, Any]", arguments))
            finetune_run = FinetuneRun(options, show, interrupt, ranks)
            with of_the_model():
                result = finetune_run.carry_out(dry_run)
    except Diverged as error:
        show.failed(str(error))
        result = {"error": str(error), "status": "diverged"}
    except TrainingError as error:
        raise Failure(str(error)) from error
    except ModelError as error:
        raise Failure(f"MODEL {arguments['model']}: {error}.") from error
    except BackendUnavailable as error:
        raise Failure(f"MODEL {arguments['model']} cannot be trained with these options: {error}.") from error
    except KeyboardInterrupt:
        ranks.leave("was stopped at once.")
        show.stopped(again(Path(str(arguments["output"])), str(arguments["resume"])))
        result = {"status": "interrupted"}
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise Failure(paragraph(error, options, begun=finetune_run.begun)) from error
    if as_json and ranks.first:
        write_json(result)
    return {"diverged": DIVERGED, "interrupted": INTERRUPTED}.get(str(result.get("status")), 0)


class FinetuneRun:
    """One run: reads the data, finds a checkpoint, loads the model, trains it, and writes the adapter."""

    def __init__(self, options: Options, show: FinetuneDisplay, interrupt: Interrupt, ranks: OneProcess):
        self.options, self.show, self.interrupt, self.ranks = options, show, interrupt, ranks
        self.output = Path(options.output)
        self.highest = 0  # highest token id in the data
        self.begun = False  # True once the output folder holds this run and no earlier one

    def carry_out(self, dry_run: bool) -> dict[str, object]:
        from ...hf.training.data.attention_masks import masks, no_masks
        from ...hf.training.errors import Diverged
        from ...hf.training.records.journal import rows as logged
        from ...hf.training.records.trackers import RunTrackers
        from ...hf.training.run.session import RunCallbacks, locked
        from ...hf.training.run.trainer import Trainer
        from ...hf.training.run.training_steps import training_steps

        self._place()
        stream, facts, evaluation = self._streams()
        training = training_steps(self.options, len(stream), self.ranks.world)
        if dry_run:
            if self.ranks.world > 1:
                self._training_session(training, dry_run)  # compares the ranks' options
            _, record, accounting = self._load_model(facts, training, stream)
            return {"status": "dry run", "proposal": accounting.proposal, **record.facts}
        session = self._training_session(training, dry_run)
        trackers = RunTrackers(self.options.report_to, self.output, self.show.note)
        callbacks = RunCallbacks(
            row=lambda row: self._show_row(row, trackers),
            note=self.show.note,
            stop=lambda: self.ranks.any(self.interrupt.requested),
        )
        with locked(self.output) if self.ranks.first else contextlib.nullcontext():
            start = self.ranks.checkpoint(lambda: session.find(self.options.resume, callbacks))
            with self._marks_failure() if self.ranks.first else contextlib.nullcontext():
                loaded, record, _ = self._load_model(facts, training, stream)
                callbacks.begun = lambda: self._mark_running(record, trackers, start.step if start else 0)
                callbacks.saved = lambda rows: self._page(record, rows)
                row_masks = masks(loaded.model, self.options.seq_len) if self.options.pack else no_masks
                trainer = Trainer(loaded.model, loaded.parameters, stream, training, row_masks, self.ranks)
                trainer.check_ranks()
                done = start.step if start else 0
                record.facts["steps"] = max(training.steps, done)
                self.show.begins(training.steps, done)
                try:
                    with self.show.progress(training.steps, done):
                        rows = session.run(trainer, callbacks, start=start, evaluation=evaluation)
                except Diverged as error:
                    if not self.ranks.first:
                        raise
                    self._page(record, logged(self.output / LOG))
                    record.write({"status": "diverged", "step": trainer.done, "error": str(error)})
                    self._explain_lost(record, RUN)
                    raise
                except KeyboardInterrupt:  # the second Ctrl-C
                    if not self.ranks.first:
                        raise
                    record.write({"status": "interrupted", "step": trainer.done})
                    self._explain_lost(record, RUN)
                    raise
                finally:
                    trackers.finish()
                return self._finish(rows, trainer, loaded, record)

    def _show_row(self, row: LogRow, trackers: RunTrackers) -> None:
        self.show.row(row)
        trackers.row(row)

    def _mark_running(self, record: Record, trackers: RunTrackers, done: int) -> None:
        self.begun = True
        trackers.start(record.facts["options"], done)
        record.write({"status": "running"})
        if RUN in record.lost:  # before the first step: nothing can be kept in this folder
            raise Failure(record.lost[RUN])

    def _page(self, record: Record, rows: Sequence[LogRow]) -> None:
        """Write the page; the first failure of several is shown, and training goes on."""
        known = PAGE in record.lost
        record.page(rows)
        if not known:
            self._explain_lost(record, PAGE)

    def _explain_lost(self, record: Record, name: str) -> None:
        if name in record.lost:
            self.show.failed(record.lost[name])

    @contextlib.contextmanager
    def _marks_failure(self) -> Iterator[None]:
        """On an error, mark the run in run.json as failed if it is marked as running; an earlier, killed run too."""
        from ...hf.checkpoint.foreign_errors import out_of_memory
        from ...hf.training.ranks.group import Ranks
        from ...hf.training.run.memory_errors import paragraph

        if isinstance(self.ranks, Ranks):
            self.ranks.presence.abandon.append(lambda notice: self._mark_failed(str(notice)))
        try:
            yield
        except Exception as error:
            message = str(error) or type(error).__name__
            if out_of_memory(error):
                message = paragraph(error, self.options, begun=self.begun)
            self._mark_failed(message)  # the original error is raised in any case
            raise

    def _mark_failed(self, message: str) -> None:
        from ...hf.training.records.checkpoints import replace
        from ...hf.training.records.journal import rows

        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            facts = parse_json((self.output / RUN).read_bytes())
            if facts["result"]["status"] == "running":
                step = max((row["step"] for row in rows(self.output / LOG)), default=0)
                facts["result"] = {"status": "failed", "step": step, "error": message}
                replace(self.output / RUN, json.dumps(facts, indent=1) + "\n")

    def _place(self) -> None:
        """This rank's share of the machine: its GPU, its processors and its threads."""
        import torch

        from ...core import processors
        from ...hf.training.model.device import chosen, hint, of_rank
        from ...hf.training.ranks.group import Ranks

        threads = self.options.threads
        if isinstance(self.ranks, Ranks):
            self.options = of_rank(self.options, self.ranks.local_rank, self.ranks.local_world)
            self.ranks.use(chosen(self.options))
            if threads is None:  # torchrun sets OMP_NUM_THREADS=1
                threads = max(1, processors.worth() // self.ranks.local_world)
                self.ranks.bind()
        elif text := hint(self.options):
            self.show.note(text)
        if threads is not None:
            torch.set_num_threads(threads)

    def _streams(self) -> tuple[RowStream, DataFacts, RowStream | None]:
        """The training rows, facts about them, and the evaluation rows or None."""
        from ...hf.training.data.sources import sources
        from ...hf.training.model.device import chosen
        from ...hf.training.model.loading import check, folder
        from ...hf.training.model.loading import tokenizer as load_tokenizer
        from ...hf.training.records import trackers
        from ...hf.training.run import output_folder as folders

        options = self.options
        chosen(options)
        trackers.check(options.report_to)
        for names in (options.data, options.eval_data):
            sources(names)
        _silence_transformers()
        with self.show.doing("reading the tokenizer and the data"):
            folders.check(options, folder(options.model))
            check(options)
            tokenizer = load_tokenizer(options.model)
            stream, facts = self._stream(options.data, tokenizer, packed=options.pack)
            evaluation = None
            if options.eval_data:
                evaluation, _ = self._stream(options.eval_data, tokenizer, packed=options.pack)
        return stream, facts, evaluation

    def _stream(self, names: Sequence[str], tokenizer: Tokenizer, *, packed: bool) -> tuple[RowStream, DataFacts]:
        from ...hf.training.data import documents as data
        from ...hf.training.data.packing import RowStream
        from ...hf.training.data.sources import shown

        options = self.options
        read = data.read(names, tokenizer, document=options.document, train_on=options.train_on)
        cut = data.cut(read, options.seq_len)
        if cut.shortened:
            files = names[0] if len(names) == 1 else shown(names)
            self.show.note(f"{files}: {count(cut.shortened, 'row')} of {len(read):,} were cut at --seq-len.")
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
        stream = RowStream(cut.documents, options.seq_len, packed=packed, seed=options.seed, pad=pad)
        self.highest = max(self.highest, pad, stream.highest)
        return stream, {
            "file": shown(names),
            "documents": len(read),
            "rows": len(stream),
            "tokens": sum(map(len, cut.documents)),
            "trained_tokens": sum(d.targets for d in cut.documents),
            "shortened": cut.shortened,
        }

    def _training_session(self, training: TrainingSteps, dry_run: bool) -> TrainingSession:
        import torch

        from ...hf.training.errors import TrainingError
        from ...hf.training.model.loading import folder
        from ...hf.training.run.identity import disagreement, identity, of_rank
        from ...hf.training.run.session import TrainingSession
        from .record import versions

        options = self.options
        model_folder = folder(options.model)
        with self.show.doing("computing the checksum of the model's files"):
            run_identity = identity(options, training, model_folder)
        if self.ranks.world > 1:
            facts = {**run_identity, **versions(), "--dry-run": dry_run}
            different = disagreement(self.ranks.gathered(of_rank(options, facts)))
            if different:
                raise TrainingError(different)
        return TrainingSession(
            self.output,
            run_identity,
            {
                "threads": torch.get_num_threads(),
                **versions(),
                "machine": platform.machine(),
                "instructions": _instructions(),
                "device": options.device.partition(":")[0],
            },
            save_every=options.save_every,
            eval_every=options.eval_every or max(1, training.steps // 10),
            keep=options.keep,
            writes=self.ranks.first,
        )

    def _load_model(
        self, facts: DataFacts, training: TrainingSteps, stream: RowStream
    ) -> tuple[LoadedModel, Record, Accounting]:
        """Load the model with its LoRA; show and return the accounting."""
        from ...hf.offload.generation import check_ids
        from ...hf.training.model.accounting import account
        from ...hf.training.model.loading import load

        with self.show.doing("loading the model") as progress, warnings_as_notes(self.show.note):
            loaded = load(self.options, progress, self.ranks.share)
        name = type(loaded.model).__name__
        if not name.endswith("ForCausalLM"):
            self.show.note(f"The model is loaded as {name} and receives only text. The adapter fits this class.")
        try:
            check_ids(loaded.model, self.highest)
        except ValueError as error:
            raise Failure(f"MODEL {self.options.model}: {error}.") from error
        with self.show.doing("measuring the memory of activations"):
            accounting = account(loaded, self.options, training, self.ranks.local_world)
        self.show.data(facts, training, len(stream))
        self.show.accounting(accounting, self.options)
        return loaded, Record(self.options, facts, accounting, training.steps, self.ranks.world), accounting

    def _finish(self, rows: list[LogRow], trainer: Trainer, loaded: LoadedModel, record: Record) -> dict[str, object]:
        from ...hf.training.model.loading import save_adapter
        from ...hf.training.run.session import again

        if trainer.done and self.ranks.first:
            try:
                save_adapter(loaded, self.output)
            except OSError as error:
                raise Failure(f"Cannot write the adapter to {self.output}: {error.strerror or error}.") from error
        if self.ranks.first:
            self._page(record, rows)
        result = result_of(rows, trainer.done, trainer.training.steps)
        if self.ranks.first:
            record.write(result)
        self.show.ended(
            result, trainer.training.steps, self.output, again(self.output, self.options.resume), record.lost
        )
        self._explain_lost(record, RUN)
        return {"output": str(self.output), **result, **record.facts}


class Interrupt:
    """Handler of Ctrl-C, SIGTERM and SIGHUP: the first ends the run after the current step, the second at once."""

    def __init__(self, show: FinetuneDisplay):
        self.show, self.requested, self.training = show, False, False

    def receive(self, number: int, frame: object) -> None:
        if self.requested or not self.show.training:
            raise KeyboardInterrupt
        self.requested = True
        self.show.note("Finishing this step, then saving. Press Ctrl-C again to stop at once.")


def _instructions() -> str:
    """The instruction sets that goldsmith and torch use here. With other ones, sums are rounded differently."""
    import torch

    from ...core import native

    goldsmith_level = native.isa() if native.reason() is None else "none"
    return f"{goldsmith_level}, {torch.backends.cpu.get_cpu_capability()} in torch"


def _silence_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
