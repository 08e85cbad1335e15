"""Proofs out of `goldsmith verify --json FILE` in place of one in the run: of this very code, on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...assay.report.html.view import NOT_JUDGED
from ...core import native
from ...core.device import machine
from ...core.op import Op
from ..say import Problem
from ..source import digest
from ..verify.merge import CANNOT_RUN
from ..verify.select import choose

Verdict = tuple[bool | None, str]


@dataclass
class ProvenCases:
    """What the files say of an operator on a backend: the cases that hold, or why it is rejected."""

    cases: set[str] = field(default_factory=set)
    impossible: set[str] = field(default_factory=set)  # the backend does not take them
    files: list[str] = field(default_factory=list)
    rejected: str = ""


Proved = dict[tuple[str, str], ProvenCases]  # operator, backend


def read(files: Sequence[str], device: str) -> Proved:
    """What the files prove together for `device`. Problem: one is not readable, or of other code, level or machine."""
    found: Proved = {}
    for file in files:
        data = _load(file)
        for proof in data["proofs"]:
            report = proof["report"]
            if report is None or torch.device(report["device"]).type != torch.device(device).type:
                continue
            if proof["backend"] == "native" and data["isa"] != native.isa():
                raise Problem(
                    f"--proof {file}: was made at level {data['isa']}, and {native.isa()} is in use here. "
                    f"Run `goldsmith verify --json FILE` at this level (GOLDSMITH_ISA takes a lower one)."
                )
            held = found.setdefault((proof["operator"], proof["backend"]), ProvenCases())
            if proof["verdict"] != "pass":
                texts = [f["text"] for f in report["findings"]] or [report["partial"] or proof["verdict"]]
                held.rejected = held.rejected or f"{texts[0]} ({Path(file).name})"
            elif data["size"] != "quick":  # which looks at one case's first run alone
                held.cases |= judged(report)
                held.impossible |= {n["case"] for n in report["notes"] if n["id"] == CANNOT_RUN} - judged(report)
            held.files.append(file)
    return found


def judged(report: dict[str, Any]) -> set[str]:
    """The cases that came to a verdict: without those that the backend refused, and what was not run or not judged."""
    without = {note["case"] for note in report["notes"] if note["id"] in NOT_JUDGED}
    return set(report["cases"]) - (without - {row["case"] for row in report["rows"]})


def judge(held: ProvenCases, op: Op, backend: str, device: str, dtype: torch.dtype) -> Verdict | None:
    """Whether the files prove `op` in this dtype as a proof in the run would; None where they do not speak of it.

    Problem: they hold some of the cases that a proof in the run takes, but not all. The error says what makes the rest.
    """
    if held.rejected:
        return False, held.rejected
    kind = str(dtype).removeprefix("torch.")
    wanted = {job.label for job in choose(op, backend, device, False, "default", kind).jobs} - held.impossible
    found = wanted & held.cases
    if not found:
        return None
    if found == wanted:
        files = ", ".join(Path(file).name for file in held.files)
        return True, f"goldsmith verify, {len(found)} of {len(wanted)} cases, {kind} ({files})"
    command = f"goldsmith verify {op.name} --backend {backend} --dtype {kind} --json whole.json"
    if device == "cpu" and torch.cuda.is_available():
        command += " --device cpu"
    raise Problem(
        f"--proof {', '.join(held.files)}: {len(found)} of the {len(wanted)} cases of {op.name} on {backend} in {kind} "
        f"that bench would prove itself. What proves them: `{command}`; then take --proof whole.json, or both files: "
        "--proof may be given several times."
    )


def _load(file: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise Problem(f"--proof {file}: cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        text = f"--proof {file}: no JSON: {error}. Wanted: what `goldsmith verify --json FILE` wrote."
        raise Problem(text) from error
    if not isinstance(data, dict) or not {"proofs", "machine", "source", "isa", "size"} <= data.keys():
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
