"""Proofs out of `goldsmith verify --json FILE` in place of one in the run: of this very code, on this machine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...core.device import machine
from ..say import Problem
from ..source import digest

Verdict = tuple[bool | None, str]
Proved = dict[tuple[str, str, torch.dtype], Verdict]  # operator, backend, dtype


def read(files: Sequence[str], device: str) -> Proved:
    """What the files prove for `device`. Problem: a file is not readable, or of other code, or of another machine."""
    found: Proved = {}
    for file in files:
        data = _load(file)
        for proof in data["proofs"]:
            report = proof["report"]
            if report is None or torch.device(report["device"]).type != torch.device(device).type:
                continue
            counts = Counter(label.rpartition(" ")[2] for label in report["cases"])
            for dtype, cases in counts.items():
                key = proof["operator"], proof["backend"], getattr(torch, dtype)
                if found.get(key, (True, ""))[0]:
                    found[key] = _verdict(proof, cases, dtype, Path(file).name)
    return found


def _verdict(proof: dict[str, Any], cases: int, dtype: str, file: str) -> Verdict:
    if proof["verdict"] == "pass":
        return True, f"goldsmith verify, {cases} cases, {dtype} ({file})"
    texts = [f["text"] for f in proof["report"]["findings"]] or [proof["report"]["partial"] or proof["verdict"]]
    return False, f"{texts[0]} ({file})"


def _load(file: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise Problem(f"--proof {file}: cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        text = f"--proof {file}: no JSON: {error}. Wanted: what `goldsmith verify --json FILE` wrote."
        raise Problem(text) from error
    if not isinstance(data, dict) or not {"proofs", "machine", "source"} <= data.keys():
        raise Problem(f"--proof {file}: not what this version's `goldsmith verify --json FILE` writes.")
    if data["interrupted"]:
        raise Problem(f"--proof {file}: that run was interrupted, and proves nothing as a whole. Run it again.")
    if data["source"] != digest():
        raise Problem(
            f"--proof {file}: proves other code: source {data['source'][:12]} there, {digest()[:12]} here. Run "
            f"`goldsmith verify --json FILE` again."
        )
    here, there = machine().short, data["machine"]
    name = there["gpus"][0]["name"] if there["gpus"] else there["cpu"]
    if name != here:
        raise Problem(f"--proof {file}: was made on another machine: {name} there, {here} here.")
    return data
