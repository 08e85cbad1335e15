"""What makes two runs the same run: the options, the model and the data that alter the result."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..options import Options, flag
from .plan import TrainingPlan

ALTERING = (
    *("document", "train_on", "format", "group_size", "rank", "alpha", "targets", "shared_a", "dropout"),
    *("lora_modules", "train_router", "dtype", "seq_len", "pack", "batch_size", "grad_accum", "lr", "schedule"),
    *("weight_decay", "max_grad_norm", "seed", "partitions"),
)


def identity(options: Options, found: TrainingPlan, folder: Path) -> dict[str, object]:
    """Everything that alters the result, by the option's name; two runs with equal identities are the same run.

    A constant rate does not depend on how many steps there will be, so such a run may be made longer.
    """
    values: dict[str, object] = {flag(name): getattr(options, name) for name in ALTERING}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    values["--warmup"] = found.schedule.warmup
    if options.schedule != "constant" or found.limit is not None:
        values["--steps or --epochs"] = found.steps
    values["MODEL"] = fingerprint(folder)
    values["--data"] = checksum(Path(options.data))
    return values


def changes(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """What differs, each as words for a reader."""
    said = []
    for name in [*now, *(name for name in before if name not in now)]:
        if before.get(name) == now.get(name):
            continue
        if name in ("MODEL", "--data"):
            said.append(f"the content of {name} is another")
        elif name in before and name in now:
            said.append(f"{name} was {_shown(before[name])} and is {_shown(now[name])}")
        else:
            said.append(f"{name} was {'given' if name in before else 'not given'} before")
    return said


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


READ = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")  # what transformers makes a model of


def fingerprint(folder: Path) -> str:
    """What tells a model's files from another's: every byte, since another revision may differ in a few of them."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in READ and path.is_file())
    digest = hashlib.sha256()
    with ThreadPoolExecutor(max(1, min(len(paths), os.cpu_count() or 1))) as readers:
        for path, found in zip(paths, readers.map(checksum, paths), strict=True):
            digest.update(f"{path.name} {found} ".encode())
    return digest.hexdigest()
