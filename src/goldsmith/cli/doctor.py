"""`goldsmith doctor`: what this machine has, which backends run on it, and why the others do not."""

from __future__ import annotations

import importlib.metadata
from typing import TypedDict, cast

import torch
from rich.markup import escape
from rich.table import Table

from .. import __version__
from ..core import native
from ..core.device import interpreter_unavailable, machine
from ..core.op import Op
from . import openmp
from .json_types import GpuFacts, MachineFacts
from .terminal import console, write_json
from .verify.selection import elements

WIDTH = 60  # columns: half of a split terminal, or a phone
PACKAGES = ("numpy", "transformers", "peft", "tokenizers", "liger-kernel")


class ThreadFacts(TypedDict):
    torch: int
    awake_for_long: bool


class NativeFacts(TypedDict):
    """The native library's instruction set level and why it is not higher, or why the library is missing."""

    reason: str | None
    isa: str | None
    machine_isa: str | None
    why_not_higher: str | None


class OperatorFacts(TypedDict):
    """An operator's backends, each with None or the reason why it cannot run on this machine."""

    name: str
    summary: str
    backends: dict[str, str | None]
    auto: str
    gradients: list[str]
    internal: bool


class DoctorReport(TypedDict):
    goldsmith: str
    machine: MachineFacts
    device: str
    native: NativeFacts
    threads: ThreadFacts
    interpreter: str | None
    packages: dict[str, str | None]
    operators: list[OperatorFacts]


def run(*, as_json: bool = False) -> None:
    facts = cast("MachineFacts", machine().to_json())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report: DoctorReport = {
        "goldsmith": __version__,
        "machine": facts,
        "device": device,
        "native": _native(),
        "threads": {"torch": torch.get_num_threads(), "awake_for_long": openmp.spins_for_long()},
        "interpreter": interpreter_unavailable() if facts["triton"] else "Triton is not installed",
        "packages": {name: _version(name) for name in PACKAGES},
        "operators": [_operator(op, device) for _, op in sorted(Op.all().items())],
    }
    if as_json:
        write_json(report)
    else:
        _show(report)


def _operator(op: Op, device: str) -> OperatorFacts:
    """The facts of one operator, tried on its smallest case."""
    case = min(op.cases, key=elements)
    arguments = case.build(torch.float32, device, 0)
    tensors = [arguments.get(name) for name in op.inputs]
    options = {name: arguments[name] for name in op.options}
    backends = {name: op.why_not(name, *tensors, **options) for name in op.backends}
    auto = next(name for name, reason in backends.items() if reason is None)
    return {
        "name": op.name,
        "summary": op.summary,
        "backends": backends,
        "auto": auto,
        "gradients": list(op.grads),
        "internal": op.internal,
    }


def _native() -> NativeFacts:
    reason = native.reason()
    if reason is not None:
        return {"reason": reason, "isa": None, "machine_isa": None, "why_not_higher": None}
    highest, why = native.machine_isa()
    return {"reason": None, "isa": native.isa(), "machine_isa": highest, "why_not_higher": why or None}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _show(report: DoctorReport) -> None:
    """Print the machine, a table of operators and backends, and each reason, within WIDTH columns."""
    out = console()
    out.width = min(out.width, WIDTH)
    facts = report["machine"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in (
        ("goldsmith", report["goldsmith"]),
        ("processor", f"{facts['cpu']}, {facts['cores']} cores usable, {facts['memory_gib']} GiB"),
        ("instructions", " ".join(facts["isa"]) or "none that goldsmith uses"),
        ("GPU", "; ".join(_gpu(g) for g in facts["gpus"]) or "none that torch can use"),
        ("torch", f"{facts['torch']} on Python {facts['python']}"),
        ("torch threads", _threads(report["threads"])),
        ("Triton", _triton(facts)),
        ("native", _levels(report["native"])),
        ("interpreter", report["interpreter"] or "can run Triton kernels on the CPU, as goldsmith verify does"),
        ("optional", ", ".join(f"{k} {v}" if v else f"{k} not installed" for k, v in report["packages"].items())),
    ):
        grid.add_row(name, escape(str(value)))
    out.print(grid)
    out.print()
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    table.add_column("operator", no_wrap=True)
    table.add_column("auto takes", no_wrap=True)
    table.add_column("also runs", overflow="fold")
    table.add_column("cannot run", overflow="fold")
    reasons: dict[str, list[str]] = {}
    shown = [op for op in report["operators"] if not op["internal"]]
    for op in shown:
        able = [name for name, reason in op["backends"].items() if reason is None and name != op["auto"]]
        unable = [name for name, reason in op["backends"].items() if reason is not None]
        for name in unable:
            reasons.setdefault(f"{name}: {op['backends'][name]}", []).append(op["name"])
        table.add_row(
            f"[bold]{op['name']}[/]", f"[green]{op['auto']}[/]", ", ".join(able), f"[dim]{', '.join(unable)}[/]"
        )
    out.print(table)
    for reason, operators in reasons.items():
        backend = reason.partition(":")[0]
        having = [op["name"] for op in shown if backend in op["backends"]]
        affected = "" if operators == having else f" ({', '.join(operators)})"
        out.print(f"\n[dim]{escape(reason)}{affected}[/]")


def _threads(threads: ThreadFacts) -> str:
    count = threads["torch"]
    if count == 1:
        return "1"
    if not threads["awake_for_long"]:
        return f"{count}, spinning only briefly between operations"
    return f"{count}, spinning for long between operations: GOMP_SPINCOUNT=10000 frees cores for experts on the CPU"


def _levels(library: NativeFacts) -> str:
    if library["reason"] is not None:
        return library["reason"]
    highest = library["machine_isa"] or ""
    text = f"level {library['isa']}"
    if library["isa"] != highest:
        text += f", lowered from {highest} by GOLDSMITH_ISA"
    if library["why_not_higher"] is not None:
        text += f"; not {native.LEVELS[native.LEVELS.index(highest) + 1]}: {library['why_not_higher']}"
    return text


def _gpu(g: GpuFacts) -> str:
    return (
        f"{g['name']}, {g['memory_gib']} GiB, compute capability {g['capability']}, "
        f"{g['multiprocessors']} multiprocessors, {g['l2_mib']} MiB of L2"
    )


def _triton(facts: MachineFacts) -> str:
    if facts["triton"] is None:
        return "not installed (it needs Linux)"
    return facts["triton"] + (", interpreter on (TRITON_INTERPRET)" if facts["interpreter"] else "")
