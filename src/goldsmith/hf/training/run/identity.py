"""The identity of a run: everything in the options, the model and the data that affects the result."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...checkpoint.gguf.files import gguf_file, parts_of
from ..data import sources
from ..data.text_files import checksum
from ..options import Options, flag
from .training_steps import TrainingSteps

ALTERING = (  # options that affect the result
    *("document", "train_on", "format", "group_size", "rank", "alpha", "targets", "shared_a", "dropout"),
    *("lora_modules", "train_router", "dtype", "seq_len", "pack", "batch_size", "grad_accum", "lr", "schedule"),
    *("weight_decay", "max_grad_norm", "seed", "partitions"),
)

RANKS = "the number of ranks"
ELSEWHERE = ("model", "data", "eval_data", "output", "threads", "device")  # may differ between the ranks of a run


def identity(options: Options, training: TrainingSteps, folder: Path) -> dict[str, object]:
    """Everything that affects the result, by option; two runs with equal identities are the same run.

    With a constant learning rate the number of steps does not matter, so such a run can be extended.
    """
    values: dict[str, object] = {flag(name): getattr(options, name) for name in ALTERING}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    values["--warmup"] = training.schedule.warmup
    if options.schedule != "constant" or training.limit is not None:
        values["--steps or --epochs"] = training.steps
    if training.ranks > 1:
        values[RANKS] = training.ranks
    values["MODEL"] = fingerprint(folder)
    values["--data"] = sources.checksum(sources.sources(options.data))
    return values


def changes(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """The differences between two identities, in words."""
    before, now = ({RANKS: 1, **values} for values in (before, now))
    differences = []
    for name in [*now, *(name for name in before if name not in now)]:
        if before.get(name) == now.get(name):
            continue
        if name in ("MODEL", "--data"):
            differences.append(f"the content of {name} has changed")
        elif name in before and name in now:
            differences.append(f"{name} was {_shown(before[name])} and is {_shown(now[name])}")
        else:
            differences.append(f"{name} was {'given' if name in before else 'not given'} before")
    return differences


def of_rank(options: Options, identity: Mapping[str, object]) -> dict[str, object]:
    """Everything that must be equal on all ranks of a run."""
    values = {flag(name): value for name, value in vars(options).items() if name not in ELSEWHERE}
    held_out = None if not options.eval_data else sources.checksum(sources.sources(options.eval_data))
    return {**values, **identity, "--eval-data": held_out}


def disagreement(values: Sequence[Mapping[str, object]]) -> str | None:
    """In words, how the first rank that differs from rank 0 does; None if all are equal."""
    for rank, own in enumerate(values):
        words = []
        for name in [*values[0], *(name for name in own if name not in values[0])]:
            theirs, ours = values[0].get(name), own.get(name)
            if theirs == ours:
                continue
            if name in ("MODEL", "--data", "--eval-data"):
                words.append(f"the content of {name} differs")
            else:
                words.append(f"{name} is {_shown(theirs)} on rank 0 and {_shown(ours)} on rank {rank}")
        if words:
            return f"Rank {rank} was started for another run than rank 0: {'; '.join(words)}."
    return None


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


READ = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")  # files from which transformers builds a model


def fingerprint(folder: Path) -> str:
    """A checksum of every byte of a model's files or GGUF file, since two revisions may differ in only a few."""
    file = gguf_file(folder)
    inside = folder if file is None else file.parent
    paths = sorted(path for path in inside.iterdir() if path.suffix in READ and path.is_file())
    paths += [] if file is None else parts_of(file)
    digest = hashlib.sha256()
    with ThreadPoolExecutor(max(1, min(len(paths), os.cpu_count() or 1))) as readers:
        for path, digest_of_file in zip(paths, readers.map(checksum, paths), strict=True):
            digest.update(f"{path.name} {digest_of_file} ".encode())
    return digest.hexdigest()
