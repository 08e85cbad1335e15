"""Checkpoints that a kill at any moment, a full disk or a power cut leaves whole or absent, never half.

A checkpoint is written to a folder with another name, every file and the folder itself are brought to the disk (fsync),
and then the folder is renamed. What is removed is renamed first, too.

state.json has the checksum of the tensors' bytes, and under "check" one of all else that it says itself. Format 1 had
no "check"; it is read as well: all that a run takes from its facts is held against the folder's name (the step), the
tensors (bytes, sha256) or the command (identity), so that damage is found there or changes nothing.
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

from ..errors import TrainingError

NAME = re.compile(r"step-(\d{6,})")
TENSORS, FACTS = "state.safetensors", "state.json"
CHECK = "check"
UNFINISHED = ".unfinished-"
FORMAT, WITHOUT_CHECK = 2, 1
KINDS = {"step": int, "bytes": int, "sha256": str, "identity": dict, "circumstances": dict}


class CheckpointFacts(TypedDict):
    """What state.json says."""

    format: int
    step: int
    bytes: int
    sha256: str
    identity: dict[str, object]
    circumstances: dict[str, object]


@dataclass(frozen=True)
class TrainingCheckpoint:
    """What was read: the step, the tensors of `Trainer.state`, and facts about the run."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    facts: CheckpointFacts


def write(folder: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, object]) -> Path:
    """Write folder/step-000010; OSError (a full disk) leaves no trace of it, and the earlier ones as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"step-{step:06d}"
    target, temporary = folder / name, folder / f"{UNFINISHED}{name}"
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    try:
        raw = safetensors.torch.save(dict(tensors))
        _store(temporary / TENSORS, raw)
        said = {"format": FORMAT, "step": step, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest(), **facts}
        _store(temporary / FACTS, (json.dumps({**said, CHECK: _check_of(said)}, indent=1) + "\n").encode())
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
    """The steps of whole checkpoints in a folder, ascending."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := NAME.fullmatch(name)))


def read(path: Path) -> TrainingCheckpoint:
    """Raises TrainingError that says what is wrong with it."""
    try:
        facts = _facts(path)
        raw = (path / TENSORS).read_bytes()
        if len(raw) != facts["bytes"]:
            raise TrainingError(f"{path}: {TENSORS} has {len(raw):,} bytes of {facts['bytes']:,}")
        if hashlib.sha256(raw).hexdigest() != facts["sha256"]:
            raise TrainingError(f"{path}: {TENSORS} is damaged (its checksum differs)")
        return TrainingCheckpoint(path, facts["step"], safetensors.torch.load(raw), facts)
    except FileNotFoundError as error:
        raise TrainingError(f"{path} is no checkpoint: {Path(error.filename).name} is missing") from error
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise TrainingError(f"{path}: {FACTS} or {TENSORS} is damaged ({error})") from error
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error.strerror or error}") from error


def _facts(path: Path) -> CheckpointFacts:
    """What state.json says, with every key that a run takes from it; TrainingError when it is damaged."""
    facts = json.loads((path / FACTS).read_bytes())
    damaged = TrainingError(f"{path}: {FACTS} is damaged (its checksum differs)")
    if not isinstance(facts, dict):
        raise damaged
    check, kind = facts.pop(CHECK, None), facts.get("format")
    if check != _check_of(facts) and (check is not None or kind != WITHOUT_CHECK):
        raise damaged
    if kind not in (FORMAT, WITHOUT_CHECK):
        raise TrainingError(f"{path}: is of format {kind}; this goldsmith reads format {FORMAT}")
    for name, wanted in KINDS.items():
        if type(facts.get(name)) is not wanted:
            raise TrainingError(f"{path}: {FACTS} is damaged ({name} is missing or is no {wanted.__name__})")
    named = NAME.fullmatch(path.name)
    if named and facts["step"] != int(named[1]):
        raise TrainingError(f"{path}: {FACTS} is damaged (it says step {facts['step']})")
    return cast("CheckpointFacts", facts)


def _check_of(facts: Mapping[str, object]) -> str:
    """The checksum of what the facts say, however the file is laid out."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def newest(folder: Path) -> tuple[TrainingCheckpoint | None, list[str]]:
    """The last whole checkpoint, and what is wrong with those after it.

    Raises TrainingError when there are some and none is whole: nobody begins anew by accident.
    """
    wrong: list[str] = []
    for step in reversed(steps(folder)):
        try:
            return read(folder / f"step-{step:06d}"), wrong
        except TrainingError as error:
            wrong.append(str(error))
    if wrong:
        raise TrainingError(
            f"No checkpoint can be read: {'; '.join(wrong)}. Put them back, or begin anew with --resume never."
        )
    return None, wrong


def prune(folder: Path, keep: int) -> None:
    """Remove all but the last `keep`, and what unfinished writes have left."""
    for entry in list(folder.iterdir()) if folder.is_dir() else []:
        if entry.name.startswith(UNFINISHED):
            shutil.rmtree(entry, ignore_errors=True)
    for step in steps(folder)[: -max(1, keep)]:
        _remove(folder / f"step-{step:06d}")


def replace(path: Path, text: str | bytes) -> None:
    """A file's new content, whole or not at all."""
    temporary = path.with_name(f"{UNFINISHED}{path.name}")
    try:
        _store(temporary, text.encode() if isinstance(text, str) else text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Bring a folder's entries to the disk."""
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


def _store(path: Path, raw: bytes) -> None:
    with open(path, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
