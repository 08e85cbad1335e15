"""Checkpoints that are complete or absent, even after a kill, a full disk or a power cut.

A checkpoint is written to a temporary folder. Every file and the folder itself are synced to disk (fsync), and then the
folder is renamed. A removed checkpoint is also renamed first.

state.json holds the checksum of the tensors' bytes and, under "check", a checksum of its other entries. Format 1 has no
"check" and can still be read. A run compares everything that it takes from these entries with the folder's name (step),
the tensors (bytes, sha256) or the command (identity). So damage is either found there or has no effect.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, cast

import safetensors.torch
from torch import Tensor

from ....core.json_values import parse_json
from ..errors import TrainingError

NAME = re.compile(r"step-(\d{6,})")
TENSORS, FACTS = "state.safetensors", "state.json"
CHECK = "check"
UNFINISHED = ".unfinished-"
FORMAT, WITHOUT_CHECK = 2, 1
KINDS = {"step": int, "bytes": int, "sha256": str, "identity": dict, "circumstances": dict}


class CheckpointFacts(TypedDict):
    """The contents of state.json."""

    format: int
    step: int
    bytes: int
    sha256: str
    identity: dict[str, object]
    circumstances: dict[str, object]


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A checkpoint that has been read: the step, the tensors of `Trainer.state`, and facts about the run."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    facts: CheckpointFacts


def write(folder: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, object]) -> Path:
    """Writes folder/step-000010; after an OSError (a full disk) nothing of it remains, and older ones are unchanged."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"step-{step:06d}"
    target, temporary = folder / name, folder / f"{UNFINISHED}{name}"
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    try:
        raw = safetensors.torch.save(dict(tensors))
        _write_synced(temporary / TENSORS, raw)
        state = {"format": FORMAT, "step": step, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest(), **facts}
        _write_synced(temporary / FACTS, (json.dumps({**state, CHECK: _check_of(state)}, indent=1) + "\n").encode())
        sync_folder(temporary)
        if target.exists():
            _remove(target)
        os.rename(temporary, target)
        sync_folder(folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints in a folder, ascending."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))


def read(path: Path) -> TrainingCheckpoint:
    """Reads a checkpoint; raises TrainingError that says what is wrong with it."""
    try:
        facts = _facts(path)
        raw = (path / TENSORS).read_bytes()
        if len(raw) != facts["bytes"]:
            raise TrainingError(f"{path}: {TENSORS} has {len(raw):,} bytes of {facts['bytes']:,}")
        if hashlib.sha256(raw).hexdigest() != facts["sha256"]:
            raise TrainingError(f"{path}: {TENSORS} is damaged (its checksum differs)")
        return TrainingCheckpoint(path, facts["step"], safetensors.torch.load(raw), facts)
    except FileNotFoundError as error:
        raise TrainingError(f"{path} is not a checkpoint: {Path(error.filename).name} is missing") from error
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise TrainingError(f"{path}: {FACTS} or {TENSORS} is damaged ({error})") from error
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error.strerror or error}") from error


def _facts(path: Path) -> CheckpointFacts:
    """The contents of state.json with all required keys; raises TrainingError if it is damaged."""
    facts = parse_json((path / FACTS).read_bytes())
    damaged = TrainingError(f"{path}: {FACTS} is damaged (its checksum differs)")
    if not isinstance(facts, dict):
        raise damaged
    check, format = facts.pop(CHECK, None), facts.get("format")
    if check != _check_of(facts) and (check is not None or format != WITHOUT_CHECK):
        raise damaged
    if format not in (FORMAT, WITHOUT_CHECK):
        raise TrainingError(f"{path}: unknown format {format}; goldsmith reads formats {WITHOUT_CHECK} and {FORMAT}")
    for name, wanted in KINDS.items():
        if type(facts.get(name)) is not wanted:
            raise TrainingError(f"{path}: {FACTS} is damaged ({name} is missing or not of type {wanted.__name__})")
    match = NAME.fullmatch(path.name)
    if match and facts["step"] != int(match[1]):
        raise TrainingError(f"{path}: {FACTS} is damaged (it says step {facts['step']})")
    return cast("CheckpointFacts", facts)


def _check_of(facts: Mapping[str, object]) -> str:
    """The checksum of the facts, independent of the file's layout."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def newest(folder: Path) -> tuple[TrainingCheckpoint | None, list[str]]:
    """The last complete checkpoint, and what is wrong with the ones after it.

    Raises TrainingError if there are checkpoints but none is complete, so that no run starts over by accident.
    """
    problems: list[str] = []
    for step in reversed(steps(folder)):
        try:
            return read(folder / f"step-{step:06d}"), problems
        except TrainingError as error:
            problems.append(str(error))
    if problems:
        raise TrainingError(
            f"No checkpoint can be read: {'; '.join(problems)}. Restore them, or start over with --resume never."
        )
    return None, problems


def prune(folder: Path, keep: int) -> None:
    """Removes all but the last `keep` checkpoints, and the remains of unfinished writes."""
    for entry in list(folder.iterdir()) if folder.is_dir() else []:
        if entry.name.startswith(UNFINISHED):
            shutil.rmtree(entry, ignore_errors=True)
    for step in steps(folder)[: -max(1, keep)]:
        _remove(folder / f"step-{step:06d}")


def replace(path: Path, text: str | bytes) -> None:
    """Replaces a file's content atomically."""
    temporary = path.with_name(f"{UNFINISHED}{path.name}")
    try:
        _write_synced(temporary, text.encode() if isinstance(text, str) else text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Syncs a folder's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    away = path.with_name(f"{UNFINISHED}away-{path.name}")
    if away.exists():
        shutil.rmtree(away)
    os.rename(path, away)
    shutil.rmtree(away)


def _write_synced(path: Path, raw: bytes) -> None:
    with open(path, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
