"""Replays a bundle: runs the same inputs on the same number of threads and checks them against the target's golden."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...checks import check
from ...declare.case import Case, Make
from ...declare.target import Target
from ...execute import hooks
from ...execute.records import Material, RunSettings
from ...execute.run import execute
from ...execute.torch_state import neutral_state, threads_set
from ...report.check_report import Report
from ...report.results import Note
from .bundle import Bundle, load_bundle, versions
from .bundle_read import DTYPES

REPRODUCED, NOT_REPRODUCED, DIFFERS = "reproduced", "not reproduced", "differs"


def replay(path: str | os.PathLike, target: Target) -> Report:
    """The report of a bundle's inputs on this machine, with the answer in `report.environment["replay"]`:

    "reproduced"      same verdict, and the same results have the same bits
    "differs"         it fails here too, but differently (or passes too, with other bits)
    "not reproduced"  another verdict

    Lists versions that differ. On an interrupt, raises KeyboardInterrupt whose `.report` has the findings so far.
    Raises ValueError if the bundle cannot be read or does not fit the target.
    """
    bundle = load_bundle(path)
    if not isinstance(target, Target):
        raise TypeError(f"replay: expected an assay.Target, got {type(target).__name__}")
    device, remark = _device(bundle.meta["device"])
    meta, dtype = bundle.meta, DTYPES[bundle.meta["dtype"]]
    inputs = {n: _on(t, device) for n, t in bundle.inputs.items()}
    supply = {n: inputs.get(n, value) for n, value in bundle.supply.items()}

    def draw(make: Make) -> dict[str, Any]:
        return dict(supply)

    case = Case(meta["case"], draw, given=True)
    material = Material(target, meta["case"], {}, inputs, bundle.scalars, meta["seed"], order=tuple(supply))
    with neutral_state(), threads_set(meta["threads"]):
        report = check(target, case, dtype=dtype, device=device, seed=meta["seed"], raises=False)
        try:
            with hooks.running(meta["case"], "replay", "the saved layout", meta["seed"], report.findings):
                run = execute(material, replace(RunSettings(), layouts=meta["layouts"]))
        except KeyboardInterrupt as error:
            error.report = report  # type: ignore[attr-defined]
            raise
    mine = {name: tensor for name, _, tensor in run.results() if tensor is not None}
    other = _other_bits(bundle, mine)
    answer = _answer(meta["verdict"], report.verdict, other)
    before, now = meta["versions"], versions(device)
    apart = {k: [before.get(k, "-"), now.get(k, "-")] for k in {**before, **now} if before.get(k) != now.get(k)}
    report.environment["replay"] = {"answer": answer, "versions": apart, "bits": other}
    message = _message(answer, meta, report, other, apart, [_another(meta["target"], target.name), remark])
    report.notes.insert(0, Note("replay", "", message, case.name))
    return report


def _answer(before: str, now: str, other: list[str]) -> str:
    if before != now:
        return NOT_REPRODUCED
    return DIFFERS if other else REPRODUCED


def _message(answer: str, meta: dict, report: Report, other: list[str], apart: dict, remarks: list[str]) -> str:
    words = [f"{answer}: the verdict was {meta['verdict']}, here it is {report.verdict}"]
    if other:
        words.append(f"other bits in {', '.join(other)}")
    if "outputs" in meta["left_out"]:
        words.append("the bundle holds no outputs, so bits were not compared")
    words += [f"{name} was {was}, here {here}" for name, (was, here) in sorted(apart.items())]
    return "; ".join(words + [remark for remark in remarks if remark])


def _another(bundle_target: str, name: str | None) -> str:
    return (
        f"the bundle is of the target {bundle_target[:80]!r}, and this one is {name!r}" if bundle_target != name else ""
    )


def _other_bits(bundle: Bundle, mine: dict[str, Tensor]) -> list[str]:
    """Results of the bundle that differ here or are missing."""
    return [n for n, was in bundle.outputs.items() if n in mine or "." not in n if not _same(was, mine.get(n))]


def _same(was: Tensor, now: Tensor | None) -> bool:
    if now is None or was.shape != now.shape or was.dtype != now.dtype:
        return False
    bits = [t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (was, now)]
    return torch.equal(*bits)


def _device(wanted: str) -> tuple[torch.device, str]:
    if wanted.startswith("cuda") and torch.cuda.is_available():
        return torch.device("cuda"), ""
    return torch.device("cpu"), f"it ran on {wanted}, not available here" if not wanted.startswith("cpu") else ""


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor with its strides and offset on a device."""
    if device.type == "cpu":
        return tensor
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).to(device)
    place = (raw.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return torch.empty(0, dtype=tensor.dtype, device=device).set_(*place)
