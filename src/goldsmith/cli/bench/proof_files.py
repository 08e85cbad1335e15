"""Proofs from files of `goldsmith verify --json FILE`, made of the same source on the same machine."""

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
from ..source import digest
from ..terminal import Problem
from ..verify.proof import CANNOT_RUN
from ..verify.selection import choose

Verdict = tuple[bool | None, str]
ReportJson = dict[str, Any]  # as `goldsmith verify --json` writes it


@dataclass
class ProvenCases:
    """What the files say about an operator on a backend: the cases that passed, or the reason to reject it."""

    cases: set[str] = field(default_factory=set)
    impossible: set[str] = field(default_factory=set)  # cases that the backend does not take
    files: list[str] = field(default_factory=list)
    rejected: str = ""


ProofsByOperator = dict[tuple[str, str], ProvenCases]  # by (operator, backend)


def read(files: Sequence[str], device: str) -> ProofsByOperator:
    """The results of these files together, for `device`.

    Raises Problem where a file cannot be read, or was made of other source, at another level or on another machine.
    """
    proven: ProofsByOperator = {}
    for file in files:
        data = _load(file)
        for proof in data["proofs"]:
            report = proof["report"]
            if report is None or torch.device(report["device"]).type != torch.device(device).type:
                continue
            if proof["backend"] == "native" and data["isa"] != native.isa():
                raise Problem(
                    f"--proof {file}: made at level {data['isa']}, but {native.isa()} is in use here. "
                    f"Run `goldsmith verify --json FILE` at this level (GOLDSMITH_ISA takes a lower one)."
                )
            cases = proven.setdefault((proof["operator"], proof["backend"]), ProvenCases())
            if proof["verdict"] != "pass":
                texts = [f["text"] for f in report["findings"]] or [report["partial"] or proof["verdict"]]
                cases.rejected = cases.rejected or f"{texts[0]} ({Path(file).name})"
            elif data["size"] != "quick":  # a quick run looks at the first run of one case
                cases.cases |= judged(report)
                cases.impossible |= {n["case"] for n in report["notes"] if n["id"] == CANNOT_RUN} - judged(report)
            cases.files.append(file)
    return proven


def judged(report: ReportJson) -> set[str]:
    """The cases with a verdict: not those that the backend refused, nor those that were not run or not judged."""
    without = {note["case"] for note in report["notes"] if note["id"] in NOT_JUDGED}
    return set(report["cases"]) - (without - {row["case"] for row in report["rows"]})


def judge(proven: ProvenCases, op: Op, backend: str, device: str, dtype: torch.dtype) -> Verdict | None:
    """Whether the files verify `op` in this dtype as completely as this run would; None if they do not cover it.

    Raises Problem if they contain only some of the cases; the message has the command that checks the rest.
    """
    if proven.rejected:
        return False, proven.rejected
    kind = str(dtype).removeprefix("torch.")
    wanted = {job.label for job in choose(op, backend, device, False, "default", kind).jobs} - proven.impossible
    covered = wanted & proven.cases
    if not covered:
        return None
    if covered == wanted:
        files = ", ".join(Path(file).name for file in proven.files)
        return True, f"goldsmith verify, {len(covered)} of {len(wanted)} cases, {kind} ({files})"
    command = f"goldsmith verify {op.name} --backend {backend} --dtype {kind} --json whole.json"
    if device == "cpu" and torch.cuda.is_available():
        command += " --device cpu"
    raise Problem(
        f"--proof {', '.join(proven.files)}: {len(covered)} of the {len(wanted)} cases of {op.name} on {backend} in "
        f"{kind} that bench would check itself. Run `{command}`, then give --proof whole.json, or both files: --proof "
        "may be given several times."
    )


def _load(file: str) -> ReportJson:
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise Problem(f"--proof {file}: cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        text = f"--proof {file}: not JSON: {error}. Expected a file of `goldsmith verify --json FILE`."
        raise Problem(text) from error
    if not isinstance(data, dict) or not {"proofs", "machine", "source", "isa", "size"} <= data.keys():
        raise Problem(f"--proof {file}: not a file of this version's `goldsmith verify --json FILE`.")
    if data["interrupted"]:
        raise Problem(f"--proof {file}: its run was interrupted, so it cannot be used. Run it again.")
    if data["source"] != digest():
        raise Problem(
            f"--proof {file}: made for other code: source {data['source'][:12]} there, {digest()[:12]} here. Run "
            f"`goldsmith verify --json FILE` again."
        )
    here, there = machine().short, data["machine"]
    name = there["gpus"][0]["name"] if there["gpus"] else there["cpu"]
    if name != here:
        raise Problem(
            f"--proof {file}: made on another machine, {name}; this one is {here}. Run `goldsmith verify --json "
            "FILE` here."
        )
    return data
