"""run.json and loss.html: the options of a run, its counts and its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ... import __version__
from ..output_files import write_or_explain
from ..terminal import count

if TYPE_CHECKING:
    from ...hf.training.model.accounting import Accounting
    from ...hf.training.options import Options
    from ...hf.training.records.journal import LogRow

LOG, RUN, PAGE = "log.jsonl", "run.json", "loss.html"
OTHERS = ("attention_lora", "router", "total")


class DataFacts(TypedDict):
    """The training data, counted."""

    file: str
    documents: int
    rows: int
    tokens: int
    trained_tokens: int
    shortened: int


class MachineName(TypedDict):
    """The device of a run, on which its speed depends."""

    name: str
    device: str
    threads: int
    cores: int
    ranks: int


class RunFacts(TypedDict):
    """run.json without its result."""

    options: dict[str, object]
    versions: dict[str, str]
    machine: MachineName
    trained_parameters: dict[str, int]
    expert_lora: dict[str, int]
    format: str
    bytes: dict[str, int]
    data: DataFacts
    steps: int


class FirstAndLast(TypedDict):
    first: float
    last: float


class Means(FirstAndLast):
    """Means over the first and over the last steps."""

    steps: int


class RunResult(TypedDict, total=False):
    """How a run ended, or that it still runs."""

    status: str
    step: int
    error: str
    loss: Means | None
    eval_loss: FirstAndLast | None
    eval_perplexity: FirstAndLast | None
    eval_mean_token_accuracy: FirstAndLast | None


def result_of(rows: Sequence[LogRow], done: int, steps: int) -> RunResult:
    """How a run ended, from its log. The training loss is a mean at both ends, as on the page: one step's varies."""
    from ...hf.training.records.loss_page import averaged, ends

    loss = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    means: Means | None = None
    if loss:
        first, last = ends(loss)
        means = {"first": first, "last": last, "steps": averaged(loss)}
    heldout = [row["eval_loss"] for row in rows if "eval_loss" in row]
    perplexity = [row["eval_perplexity"] for row in rows if "eval_perplexity" in row]
    accuracy = [row["eval_mean_token_accuracy"] for row in rows if "eval_mean_token_accuracy" in row]
    return {
        "status": "trained" if done >= steps else "interrupted",
        "step": done,
        "loss": means,
        "eval_loss": _first_and_last(heldout),
        "eval_perplexity": _first_and_last(perplexity),
        "eval_mean_token_accuracy": _first_and_last(accuracy),
    }


def _first_and_last(values: Sequence[float]) -> FirstAndLast | None:
    return {"first": values[0], "last": values[-1]} if values else None


class Record:
    """The facts of one run, and the two files that show them; a reader never sees half a file."""

    def __init__(self, options: Options, data: DataFacts, accounting: Accounting, steps: int, ranks: int = 1):
        self.options, self.output = options, Path(options.output)
        self.lost: dict[str, str] = {}  # a file that could not be written -> the sentence that says why
        self.facts: RunFacts = {
            "options": _plain(options),
            "versions": versions(),
            "machine": _machine(options.device, ranks),
            "trained_parameters": accounting.trained,
            "expert_lora": accounting.expert_lora,
            "format": accounting.format,
            "bytes": {k: v for k, v in accounting.to_dict().items() if isinstance(v, int)},
            "data": data,
            "steps": steps,
        }

    def write(self, result: RunResult) -> None:
        """Write run.json; an error is kept in `lost`, so that it costs neither training nor result."""
        from ...hf.training.records.checkpoints import replace

        self._keep(
            RUN, lambda: replace(self.output / RUN, json.dumps({**self.facts, "result": result}, indent=1) + "\n")
        )

    def page(self, rows: Sequence[LogRow]) -> None:
        """Write loss.html; an error is kept in `lost`."""
        from ...hf.training.records import loss_page as page

        title = f"{Path(self.options.model).name} on {self.facts['data']['file']}"
        steps, trained, run = self.facts["steps"], self._trained(), self._run()
        self._keep(PAGE, lambda: page.write(self.output / PAGE, rows, steps, title=title, trained=trained, run=run))

    def _keep(self, name: str, write: Callable[[], object]) -> None:
        failures = write_or_explain(self.output / name, write)
        if failures:
            self.lost[name] = failures[0]
        else:
            self.lost.pop(name, None)

    def _trained(self) -> list[tuple[str, str]]:
        trained = self.facts["trained_parameters"]
        numbers = [(f"expert LoRA, {name}", f"{n:,}") for name, n in self.facts["expert_lora"].items()]
        return numbers + [(name.replace("_lora", " LoRA"), f"{trained[name]:,}") for name in OTHERS]

    def _run(self) -> list[tuple[str, str]]:
        from ...hf.training.data.sources import shown

        data, options, ranks = self.facts["data"], self.options, self.facts["machine"]["ranks"]
        held_out = [("held-out text", shown(options.eval_data))] if options.eval_data else []
        on_ranks = f" on each of {ranks} ranks" if ranks > 1 else ""
        return [
            ("model", options.model),
            ("data", f"{data['file']}, {count(data['documents'], 'document')}, {count(data['tokens'], 'token')}"),
            *held_out,
            ("LoRA", f"rank {options.rank}, alpha {options.alpha:g}, {', '.join(options.targets)}"),
            ("experts", self.facts["format"]),
            ("rate", f"{options.lr:g}, {options.schedule}"),
            (
                "a step",
                f"{options.batch_size} x {options.grad_accum} rows of at most {options.seq_len:,} tokens{on_ranks}",
            ),
            ("seed", str(options.seed)),
            ("machine", self.facts["machine"]["name"]),
            ("versions", ", ".join(f"{name} {number}" for name, number in self.facts["versions"].items())),
        ]


def _plain(options: Options) -> dict[str, object]:
    """The options as JSON has them: a single file as text, as several have always been a list."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(options).items()}
    for name in ("data", "eval_data"):
        names = list(getattr(options, name))
        values[name] = names if len(names) > 1 else next(iter(names), None)
    return values


def versions() -> dict[str, str]:
    return {"goldsmith": __version__, **{name: version(name) for name in ("torch", "transformers", "peft")}}


def _machine(device: str, ranks: int) -> MachineName:
    import torch

    from ...core.device import machine

    here = machine()
    on_gpu = device != "cpu" and torch.cuda.is_available()
    name = torch.cuda.get_device_name(device) if on_gpu else here.cpu
    threads = torch.get_num_threads()
    return {"name": name, "device": device, "threads": threads, "cores": here.cores, "ranks": ranks}
