"""`goldsmith finetune`: from the command line's words to a run, and what is said of it."""

from __future__ import annotations

import contextlib
import json
import platform
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..say import Problem, console, count, put_json, told
from .record import LOG, RUN, Record
from .show import Shown

if TYPE_CHECKING:
    from ...hf.training.records.journal import LogRow

DIVERGED, INTERRUPTED = 1, 130


def run(given: dict[str, Any], *, dry_run: bool, as_json: bool) -> int:
    """The whole command; returns the exit status."""
    try:
        from ...core.device import BackendUnavailable
        from ...hf.training.errors import Diverged, TrainingError
        from ...hf.training.options import Options
        from ...hf.training.run.memory_errors import out_of_memory, paragraph
        from ...hf.training.run.session import again
    except ImportError as error:
        if error.name is not None:  # of one of ours; goldsmith.hf says in words what is not installed
            raise
        raise Problem(f"{error}.") from error
    show = Shown(console(stderr=True), console(stderr=True) if as_json else console())
    interrupt = Interrupt(show)
    result: dict[str, Any] = {}
    try:
        with told(interrupt.told, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            options = Options(**given)
            work = Run(options, show, interrupt)
            result = work.carry_out(dry_run)
    except Diverged as error:
        show.failed(str(error))
        result = {"error": str(error), "status": "diverged"}
    except TrainingError as error:
        raise Problem(str(error)) from error
    except BackendUnavailable as error:
        raise Problem(f"MODEL {given['model']} cannot be trained so: {error}.") from error
    except KeyboardInterrupt:
        show.stopped(again(Path(given["output"]), given["resume"]))
        result = {"status": "interrupted"}
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise Problem(paragraph(error, options, begun=work.begun)) from error
    if as_json:
        put_json(result)
    return {"diverged": DIVERGED, "interrupted": INTERRUPTED}.get(result.get("status", ""), 0)


class Run:
    """One run, step by step of the command: data, checkpoint, model, accounting, training, adapter."""

    def __init__(self, options: Any, show: Shown, interrupt: Interrupt):
        self.options, self.show, self.interrupt = options, show, interrupt
        self.output = Path(options.output)
        self.highest = 0  # token id of all data
        self.begun = False  # from here on what lies in the folder is this run's

    def carry_out(self, dry_run: bool) -> dict[str, Any]:
        from ...hf.training.data.attention_masks import masks, no_masks
        from ...hf.training.errors import Diverged
        from ...hf.training.records.journal import rows as logged
        from ...hf.training.run.plan import plan
        from ...hf.training.run.session import RunCallbacks, lock
        from ...hf.training.run.trainer import Trainer

        stream, said, held = self._streams()
        found = plan(self.options, len(stream))
        if dry_run:
            _, record, accounting = self._model(said, found, stream)
            return {"status": "dry run", "proposal": accounting.proposal, **record.facts}
        session = self._session(found)
        watcher = RunCallbacks(row=self.show.row, note=self.show.note, stop=lambda: self.interrupt.asked)
        with lock(self.output):
            start = session.find(self.options.resume, watcher)
            with self._told_in_run_json():
                loaded, record, _ = self._model(said, found, stream)
                watcher.begun = lambda: self._begins(record)
                watcher.saved = lambda rows: record.page(rows)
                apart = masks(loaded.model) if self.options.pack else no_masks
                trainer = Trainer(loaded.model, loaded.parameters, stream, found, apart)
                done = start.step if start else 0
                record.facts["steps"] = max(found.steps, done)
                self.show.begins(found.steps, done)
                try:
                    with self.show.progress(found.steps, done):
                        rows = session.run(trainer, watcher, start=start, evaluation=held)
                except Diverged as error:
                    record.page(logged(self.output / LOG))
                    record.write({"status": "diverged", "step": trainer.done, "error": str(error)})
                    raise
                except KeyboardInterrupt:  # the second Ctrl-C
                    record.write({"status": "interrupted", "step": trainer.done})
                    raise
                return self._end(rows, trainer, loaded, record)

    def _begins(self, record: Record) -> None:
        self.begun = True
        record.write({"status": "running"})

    @contextlib.contextmanager
    def _told_in_run_json(self) -> Iterator[None]:
        """Inside, an error is also the end of the run that run.json has as running, be it one that was killed."""
        from ...hf.training.records.checkpoints import replace
        from ...hf.training.records.journal import rows
        from ...hf.training.run.memory_errors import out_of_memory, paragraph

        try:
            yield
        except Exception as error:
            said = str(error) or type(error).__name__
            if out_of_memory(error):
                said = paragraph(error, self.options, begun=self.begun)
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # the error itself is what matters
                facts = json.loads((self.output / RUN).read_bytes())
                if facts["result"]["status"] == "running":
                    step = max((row["step"] for row in rows(self.output / LOG)), default=0)
                    facts["result"] = {"status": "failed", "step": step, "error": said}
                    replace(self.output / RUN, json.dumps(facts, indent=1) + "\n")
            raise

    def _streams(self) -> tuple[Any, dict[str, Any], Any]:
        """The rows to train on, what is said of them, and those that are held out, or None."""
        import torch

        from ...hf.training.data import documents as data
        from ...hf.training.model.device import chosen
        from ...hf.training.model.loading import check, folder, tokenizer
        from ...hf.training.run import output_folder as folders

        options = self.options
        chosen(options)
        for path in (options.data, options.eval_data):
            if path is not None:
                data.check(Path(path))
        _quiet()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        with self.show.doing("reading the tokenizer and the data"):
            folders.check(options, folder(options.model))
            check(options)
            words = tokenizer(options.model)
            stream, said = self._stream(options.data, words, packed=options.pack)
            held = None
            if options.eval_data is not None:
                held, _ = self._stream(options.eval_data, words, packed=options.pack)
        return stream, said, held

    def _stream(self, path: str, words: Any, *, packed: bool) -> tuple[Any, dict[str, Any]]:
        from ...hf.training.data import documents as data
        from ...hf.training.data.packing import RowStream

        options = self.options
        read = data.read(path, words, document=options.document, train_on=options.train_on)
        cut = data.cut(path, read, options.seq_len)
        if cut.shortened:
            self.show.note(f"{path}: {count(cut.shortened, 'row')} of {len(read):,} lost what lies beyond --seq-len.")
        pad = words.pad_token_id if words.pad_token_id is not None else words.eos_token_id or 0
        stream = RowStream(cut.documents, options.seq_len, packed=packed, seed=options.seed, pad=pad)
        self.highest = max(self.highest, pad, stream.highest)
        return stream, {
            "file": Path(path).name,
            "documents": len(read),
            "rows": len(stream),
            "tokens": sum(map(len, cut.documents)),
            "trained_tokens": sum(d.targets for d in cut.documents),
            "shortened": cut.shortened,
        }

    def _session(self, found: Any) -> Any:
        import torch

        from ...hf.training.model.loading import folder
        from ...hf.training.run.identity import identity
        from ...hf.training.run.session import TrainingSession
        from .record import versions

        options = self.options
        place = folder(options.model)
        with self.show.doing("reading the model's files for what tells them from another's"):
            itself = identity(options, found, place)
        return TrainingSession(
            self.output,
            itself,
            {
                "threads": torch.get_num_threads(),
                **versions(),
                "machine": platform.machine(),
                "instructions": _instructions(),
                "device": options.device.partition(":")[0],
            },
            save_every=options.save_every,
            eval_every=options.eval_every or max(1, found.steps // 10),
            keep=options.keep,
        )

    def _model(self, said: dict[str, Any], found: Any, stream: Any) -> tuple[Any, Record, Any]:
        """The model with its LoRA, and the accounting, which is shown."""
        from ...hf.training.model.accounting import account
        from ...hf.training.model.loading import load

        with self.show.doing("loading the model") as progress:
            loaded = load(self.options, progress)
        size = loaded.embeddings
        if self.highest >= size:
            raise Problem(
                f"MODEL {self.options.model}: its tokenizer gives the id {self.highest:,}, and its vocabulary has "
                f"{size:,} rows: tokenizer and weights are not of one model."
            )
        with self.show.doing("measuring what an activation takes"):
            accounting = account(loaded, self.options, found)
        self.show.data(said, found, len(stream))
        self.show.accounting(accounting, self.options)
        return loaded, Record(self.options, said, accounting, found.steps), accounting

    def _end(self, rows: list[LogRow], trainer: Any, loaded: Any, record: Record) -> dict[str, Any]:
        from ...hf.training.model.loading import save_adapter
        from ...hf.training.run.session import again

        if trainer.done:
            try:
                save_adapter(loaded, self.output)
            except OSError as error:
                raise Problem(
                    f"The adapter could not be written to {self.output}: {error.strerror or error}."
                ) from error
        record.page(rows)
        result = {"status": "trained" if trainer.done >= trainer.plan.steps else "interrupted", "step": trainer.done}
        result |= {name: _ends([row[name] for row in rows if name in row]) for name in ("loss", "eval_loss")}
        record.write(result)
        self.show.ended(result, trainer.plan.steps, self.output, again(self.output, self.options.resume))
        return {"output": str(self.output), **result, **record.facts}


class Interrupt:
    """Ctrl-C, SIGTERM and SIGHUP: the first ends the run after the step that is under way, the second at once."""

    def __init__(self, show: Shown):
        self.show, self.asked, self.training = show, False, False

    def told(self, number: int, frame: object) -> None:
        if self.asked or not self.show.training:
            raise KeyboardInterrupt
        self.asked = True
        self.show.note("Finishing this step, then saving. Once more, and it stops at once.")


def _instructions() -> str:
    """Of the processor, as our library and torch use them: with others, sums are added up in another order."""
    import torch

    from ...core import native

    ours = native.isa() if native.reason() is None else "none"
    return f"{ours}, {torch.backends.cpu.get_cpu_capability()} in torch"


def _ends(values: list[float]) -> dict[str, float] | None:
    return {"first": values[0], "last": values[-1]} if values else None


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
