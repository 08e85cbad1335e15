"""`goldsmith finetune`: from the command line's words to a run, and what is said of it."""

from __future__ import annotations

import json
import platform
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from ... import __version__
from ..say import Problem, console, count
from .show import Shown

DIVERGED, INTERRUPTED = 1, 130


def run(given: dict[str, Any], *, dry_run: bool, as_json: bool) -> int:
    """The whole command; returns the exit status."""
    try:
        from ...hf.training.errors import Diverged, TrainingError
        from ...hf.training.options import Options
    except ImportError as error:
        if error.name is not None:  # of one of ours; goldsmith.hf says in words what is not installed
            raise
        raise Problem(f"{error}.") from error
    show = Shown(console(stderr=True), console(stderr=True) if as_json else console())
    interrupt = Interrupt(show)
    result: dict[str, Any] = {}
    try:
        with interrupt:
            result = Run(Options(**given), show, interrupt).carry_out(dry_run)
    except Diverged as error:
        show.failed(str(error))
        result = {"error": str(error), "status": "diverged"}
    except TrainingError as error:
        raise Problem(str(error)) from error
    except KeyboardInterrupt:
        raise Problem("Interrupted before the first step; nothing was trained.") from None
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    return {"diverged": DIVERGED, "interrupted": INTERRUPTED}.get(result.get("status", ""), 0)


class Run:
    """One run, step by step of the command: data, checkpoint, model, accounting, training, adapter."""

    def __init__(self, options: Any, show: Shown, interrupt: Interrupt):
        self.options, self.show, self.interrupt = options, show, interrupt
        self.output = Path(options.output)

    def carry_out(self, dry_run: bool) -> dict[str, Any]:
        import torch

        from ...hf.training import data
        from ...hf.training import model as models
        from ...hf.training.accounting import account
        from ...hf.training.loop import Trainer
        from ...hf.training.options import identity, plan
        from ...hf.training.session import Session, Watcher, lock

        options, show = self.options, self.show
        if options.device != "cpu":
            raise Problem(f"--device {options.device}: experts are fine-tuned on the CPU; leave --device out.")
        for path in (options.data, options.eval_data):
            if path is not None:
                data.check(Path(path))
        _quiet()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        with show.doing("reading the tokenizer and the data"):
            tokenizer = models.tokenizer(options.model)
            stream, said = self._stream(options.data, tokenizer, packed=options.pack)
            held = None
            if options.eval_data is not None:
                held, _ = self._stream(options.eval_data, tokenizer, packed=True)
        found = plan(options, len(stream))
        session = Session(
            self.output,
            identity(options, found),
            {"threads": torch.get_num_threads(), "torch": torch.__version__, "machine": platform.machine()},
            save_every=options.save_every,
            eval_every=options.eval_every or max(1, found.steps // 10),
            keep=options.keep,
        )
        watcher = Watcher(row=show.row, saved=self._saved, note=show.note, stop=lambda: self.interrupt.asked)
        held_folder = None if dry_run else lock(self.output)
        try:
            start = None if dry_run else session.find(options.resume, watcher)
            with show.doing("loading the model") as progress:
                loaded = models.load(options, progress)
            with show.doing("measuring what an activation takes"):
                accounting = account(loaded, options, found)
            show.data(said, found, stream)
            show.accounting(accounting, options)
            self.facts: dict[str, Any] = {
                "options": _listed(vars(options)),
                "versions": _versions(),
                "trained_parameters": accounting.trained,
                "expert_lora": accounting.expert_lora,
                "format": accounting.format,
                "bytes": {k: v for k, v in accounting.to_dict().items() if isinstance(v, int)},
                "data": said,
                "steps": found.steps,
            }
            if dry_run:
                return {"status": "dry run", "proposal": accounting.proposal, **self.facts}
            self._record({"status": "running"})
            trainer = Trainer(loaded.model, loaded.parameters, stream, found)
            show.begins(found.steps, start.step if start else 0, accounting)
            with show.progress(found.steps, start.step if start else 0):
                rows = session.run(trainer, watcher, start=start, evaluation=held)
            return self._end(rows, trainer, loaded)
        finally:
            if held_folder is not None:
                held_folder.close()

    def _stream(self, path: str, tokenizer: Any, *, packed: bool) -> tuple[Any, dict[str, Any]]:
        from ...hf.training import data
        from ...hf.training.packing import Stream

        options = self.options
        read = data.read(path, tokenizer, document=options.document, train_on=options.train_on)
        cut = data.cut(path, read, options.seq_len)
        if cut.shortened:
            self.show.note(f"{path}: {count(cut.shortened, 'row')} of {len(read):,} lost what lies beyond --seq-len.")
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
        stream = Stream(cut.documents, options.seq_len, packed=packed, seed=options.seed, pad=pad)
        return stream, {
            "file": Path(path).name,
            "documents": len(read),
            "rows": len(stream),
            "tokens": sum(map(len, cut.documents)),
            "trained_tokens": sum(d.targets for d in cut.documents),
            "shortened": cut.shortened,
        }

    def _saved(self, step: int, path: Path) -> None:
        from ...hf.training.journal import rows

        self._page(rows(self.output / "log.jsonl"))

    def _end(self, rows: list[dict[str, Any]], trainer: Any, loaded: Any) -> dict[str, Any]:
        from ...hf.training.model import save_adapter

        ended = trainer.done == trainer.plan.steps
        if trainer.done:
            try:
                save_adapter(loaded, self.output)
            except OSError as error:
                raise Problem(
                    f"The adapter could not be written to {self.output}: {error.strerror or error}."
                ) from error
        self._page(rows)
        losses = [row["loss"] for row in rows if "loss" in row]
        held = [row["eval_loss"] for row in rows if "eval_loss" in row]
        result = {
            "status": "trained" if ended else "interrupted",
            "step": trainer.done,
            "loss": {"first": losses[0], "last": losses[-1]} if losses else None,
            "eval_loss": {"first": held[0], "last": held[-1]} if held else None,
        }
        self._record(result)
        self.show.ended(result, trainer.plan.steps, self.output)
        return {"output": str(self.output), **result, **self.facts}

    def _record(self, result: dict[str, Any]) -> None:
        from ...hf.training.checkpoint import replace

        try:
            replace(self.output / "run.json", json.dumps({**self.facts, "result": result}, indent=1) + "\n")
        except OSError as error:
            raise Problem(f"{self.output} cannot be written: {error.strerror or error}.") from error

    def _page(self, rows: list[dict[str, Any]]) -> None:
        from ...hf.training import page

        said, options, trained = self.facts["data"], self.options, self.facts["trained_parameters"]
        numbers = [(f"expert LoRA, {name}", f"{n:,}") for name, n in self.facts["expert_lora"].items()]
        numbers += [
            (name.replace("_lora", " LoRA"), f"{trained[name]:,}") for name in ("attention_lora", "router", "total")
        ]
        shown = [
            ("model", options.model),
            ("data", f"{said['file']}, {count(said['documents'], 'document')}, {count(said['tokens'], 'token')}"),
            ("LoRA", f"rank {options.rank}, alpha {options.alpha:g}, {', '.join(options.targets)}"),
            ("experts", self.facts["format"]),
            ("rate", f"{options.lr:g}, {options.schedule}"),
            ("a step", f"{options.batch_size} x {options.grad_accum} rows of at most {options.seq_len:,} tokens"),
            ("seed", str(options.seed)),
            ("versions", ", ".join(f"{name} {version}" for name, version in self.facts["versions"].items())),
        ]
        title = f"{Path(options.model).name} on {said['file']}"
        page.write(self.output / "loss.html", rows, self.facts["steps"], title=title, trained=numbers, run=shown)


class Interrupt:
    """Ctrl-C and SIGTERM: the first ends the run after the step that is under way, the second at once."""

    def __init__(self, show: Shown):
        self.show, self.asked, self.training = show, False, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._before[number] = signal.signal(number, self._told)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _told(self, number: int, frame: object) -> None:
        if self.asked or not self.show.training:
            raise KeyboardInterrupt
        self.asked = True
        self.show.note("Finishing this step, then saving. Once more, and it stops at once.")


def _listed(values: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"goldsmith": __version__, **{name: version(name) for name in ("torch", "transformers", "peft")}}


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
