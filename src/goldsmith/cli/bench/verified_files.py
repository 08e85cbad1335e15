"""Results from files of `goldsmith verify --json FILE` for the same source on the same machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...assay.report.html.view import NOT_JUDGED
from ...core import native
from ...core.device import machine
from ...core.json_values import parse_json
from ...core.op import Op
from ..source import digest
from ..terminal import Failure
from ..verify.checks import CANNOT_RUN
from ..verify.selection import choose

Verdict = tuple[bool | None, str]
ReportJson = dict[str, Any]  # as `goldsmith verify --json` writes it


@dataclass
class VerifiedCases:
    """What the files say about an operator on a backend: the cases that passed, or the reason to reject it."""

    cases: set[str] = field(default_factory=set)
    impossible: set[str] = field(default_factory=set)  # cases that the backend does not take
    files: list[str] = field(default_factory=list)
    rejected: str = ""


ResultsByOperator = dict[tuple[str, str], VerifiedCases]  # by (operator, backend)


def read(files: Sequence[str], device: str) -> ResultsByOperator:
    """The results of these files together, for `device`.

    Raises Failure where a file cannot be read, or belongs to other source, another level or another machine.
    """
    verified: ResultsByOperator = {}
    for file in files:
        data = _load(file)
        for check in data["proofs"]:
            report = check["report"]
            if report is None or torch.device(report["device"]).type != torch.device(device).type:
                continue
            if check["backend"] == "native" and data["isa"] != native.isa():
                raise Failure(
                    f"--verified {file}: made at level {data['isa']}, but {native.isa()} is in use here. "
                    f"Run `goldsmith verify --json FILE` at this level (GOLDSMITH_ISA takes a lower one)."
                )
            cases = verified.setdefault((check["operator"], check["backend"]), VerifiedCases())
            if check["verdict"] != "pass":
                texts = [f["text"] for f in report["findings"]] or [report["partial"] or check["verdict"]]
                cases.rejected = cases.rejected or f"{texts[0]} ({Path(file).name})"
            elif data["size"] != "quick":  # a quick run looks at the first run of one case
                cases.cases |= judged(report)
                cases.impossible |= {n["case"] for n in report["notes"] if n["id"] == CANNOT_RUN} - judged(report)
            cases.files.append(file)
    return verified


def judged(report: ReportJson) -> set[str]:
    """The cases with a verdict: not those that the backend refused, nor those that were not run or not judged."""
    without = {note["case"] for note in report["notes"] if note["id"] in NOT_JUDGED}
    return set(report["cases"]) - (without - {row["case"] for row in report["rows"]})


def judge(verified: VerifiedCases, op: Op, backend: str, device: str, dtype: torch.dtype) -> Verdict | None:
    """Whether the files verify `op` in this dtype as completely as this run would; None if they do not cover it.

    Raises Failure if they contain only some of the cases; the message has the command that checks the rest.
    """
    if verified.rejected:
        return False, verified.rejected
    kind = str(dtype).removeprefix("torch.")
    wanted = {job.label for job in choose(op, backend, device, False, "default", kind).jobs} - verified.impossible
    covered = wanted & verified.cases
    if not covered:
        return None
    if covered == wanted:
        files = ", ".join(Path(file).name for file in verified.files)
        return True, f"goldsmith verify, {len(covered)} of {len(wanted)} cases, {kind} ({files})"
    command = f"goldsmith verify {op.name} --backend {backend} --dtype {kind} --json whole.json"
    if device == "cpu" and torch.cuda.is_available():
        command += " --device cpu"
    raise Failure(
        f"--verified {', '.join(verified.files)}: has {len(covered)} of the {len(wanted)} cases of {op.name} on "
        f"{backend} in {kind} that bench would check itself. Run `{command}`, then give --verified whole.json, or both "
        "files: --verified may be given several times."
    )


def _load(file: str) -> ReportJson:
    try:
        data = parse_json(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise Failure(f"--verified {file}: cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        text = f"--verified {file}: not JSON: {error}. Expected a file of `goldsmith verify --json FILE`."
        raise Failure(text) from error
    if not isinstance(data, dict) or not {"proofs", "machine", "source", "isa", "size"} <= data.keys():
        raise Failure(f"--verified {file}: not a file of this version's `goldsmith verify --json FILE`.")
    if data["interrupted"]:
        raise Failure(f"--verified {file}: its run was interrupted, so it cannot be used. Run it again.")
    if data["source"] != digest():
        raise Failure(
            f"--verified {file}: made for other code: source {data['source'][:12]} there, {digest()[:12]} here. Run "
            f"`goldsmith verify --json FILE` again."
        )
    here, there = machine().short, data["machine"]
    name = there["gpus"][0]["name"] if there["gpus"] else there["cpu"]
    if name != here:
        raise Failure(
            f"--verified {file}: made on another machine, {name}; this one is {here}. Run `goldsmith verify --json "
            "FILE` here."
        )
    return data
