"""What the gate says of the specimens, beside three checks that people use.

    python -m benchmarks.gate.score --out rows.jsonl [--jobs 2] [--json FILE] [NAME ...]
    python -m benchmarks.gate.score --device cuda --out g.jsonl --json benchmarks/results/gate_specimens_gpu.json liger

Each row has the specimen, the verdict, its reason and its seconds, and whether each check accepts the candidate:

    allclose      one call, `torch.allclose` with 1e-2, in a process that the candidate shares (`naive.py`, "harness")
    kernelbench   five seeds, `torch.allclose` with 1e-2 for results only, as KernelBench does
    assert_close  one call, `torch.testing.assert_close` with its own tolerances, results and gradients

A reason is right if the specimen names it, or if the verdict has a status other than "cheating" that it allows. A run
continues where the file of rows ends. The last lines are the table. The exit status is 1 if a right candidate is not
accepted or a cheating one is. On a GPU the gate alone is asked.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from goldsmith.assay.execute.interpreted_kernels import interpreted_kernels
from goldsmith.assay.gate import (
    Candidate,
    GateOptions,
    Judges,
    Limits,
    ProblemSource,
    Verdict,
    judge,
    load_problem,
)  # fmt: skip
from goldsmith.core.json_values import JsonRows

from . import naive, specimens
from .specimens import CHEATS, PROBLEMS, RIGHT, Specimen
from .throughput import conditions

SECONDS = 20  # for each check and for each limit of the gate
WITH_TUNING = 120  # on a GPU, where a first call compiles and tunes
SEEDS = 5
Row = dict[str, object]


def kernelbench(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(
        a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-2)
        for a, b in zip(results, expected, strict=True)
    )


def assert_close(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    torch.testing.assert_close(results, expected)
    return True


@interpreted_kernels()
def _accepted(specimen: Specimen, seeds: int, agree: Callable[..., bool], gradients: bool) -> bool:
    """Whether a check accepts the candidate, in the process that runs this."""
    target = specimens.target(specimen)
    for seed in range(seeds):
        values = target.cases[0].build(target.dtypes[0], "cpu", seed)
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        leaves = [tensors[name].requires_grad_() for name in target.wanted_grads(tensors)] if gradients else []
        expected = naive._tuple(target.bound("golden", values)(values))
        results = naive._tuple(target.bound("candidate", values)(values))
        if not agree(results, expected):
            return False
        if leaves and any(result.requires_grad for result in results):
            if not agree(naive._gradients(results, leaves), naive._gradients(expected, leaves)):
                return False
    return True


def _in_a_child(connection: Connection, *arguments: Any) -> None:
    naive.close_others(connection.fileno())
    sys.stdout = sys.stderr = open(os.devnull, "w")
    connection.send(_accepted(*arguments))


def in_a_child(specimen: Specimen, *arguments: object) -> bool:
    """The answer of a child with a temporary folder of its own; False if it dies or takes too long."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        earlier, tempfile.tempdir = tempfile.tempdir, folder
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_in_a_child, args=(theirs, specimen, *arguments))
        child.start()
        theirs.close()
        tempfile.tempdir = earlier
        try:
            return bool(ours.recv()) if ours.poll(SECONDS) else False
        except (EOFError, OSError):
            return False
        finally:
            child.kill()
            child.join()


def checks(specimen: Specimen) -> dict[str, bool]:
    return {
        "allclose": naive._once("harness", specimen),
        "kernelbench": in_a_child(specimen, SEEDS, kernelbench, False),
        "assert_close": in_a_child(specimen, 1, assert_close, True),
    }


def rows(chosen: list[Specimen], jobs: int, device: str) -> Iterator[Row]:
    """A row for each specimen, in the order in which they are finished."""
    limits = Limits(seconds=SECONDS, import_seconds=SECONDS)
    if device == "cuda":
        limits = Limits(seconds=WITH_TUNING, import_seconds=WITH_TUNING, total_seconds=5 * WITH_TUNING)
    usual = [specimen for specimen in chosen if not specimen.kernel_asked]
    with Judges(jobs, GateOptions(device, limits)) as judges:
        for number, verdict in judges.run((ProblemSource(problem_of(s)), candidate_of(s)) for s in usual):
            yield row_of(usual[number], verdict)
    for specimen in (s for s in chosen if s.kernel_asked):
        problem = replace(load_problem(problem_of(specimen)), wants_kernel=True)
        yield row_of(specimen, judge(candidate_of(specimen), problem, device=device, limits=limits))


def row_of(specimen: Specimen, verdict: Verdict) -> Row:
    return {
        "name": specimen.name,
        "right": specimen.path.is_relative_to(RIGHT),
        "expected": list(specimen.statuses),
        "reasons": sorted(specimen.reasons),
        "status": verdict.status,
        "reason": verdict.reason,
        "evidence": list(verdict.evidence)[:2],
        "seconds": round(verdict.seconds, 2),
    }


def problem_of(specimen: Specimen) -> str:
    return str(PROBLEMS / f"{specimen.problem}.py")


def candidate_of(specimen: Specimen) -> Candidate:
    return Candidate(specimen.name, specimen.path.read_text(encoding="utf-8"))


def accepts(check: str) -> Callable[[Row], bool]:
    return lambda row: bool(row.get(check))


def right_reason(row: Row) -> bool:
    """Whether the reason is one that the specimen names, or the status another than "cheating" that it allows."""
    allowed = row["status"] != "cheating" and row["status"] in row["expected"]  # type: ignore[operator]
    return allowed or row["status"] != "accepted" and row["reason"] in row["reasons"]  # type: ignore[operator]


def table(done: Iterable[Row]) -> list[str]:
    """Lines for people: what was seen, how many reasons are right, and what the other checks accept."""
    every = list(done)
    cheats = [row for row in every if not row["right"] and row["expected"][0] == "cheating"]  # type: ignore[index]
    others = [row for row in every if not row["right"] and row not in cheats]
    right = [row for row in every if row["right"]]
    named = [row for row in cheats if right_reason(row)]
    lines = [f"{'':12}{'cheating':>16}{'wrong or hostile':>20}{'right, refused':>18}"]
    groups = (cheats, others, right)

    def line(name: str, accepted: Callable[[Row], bool]) -> str:
        passed = [sum(map(accepted, group)) for group in groups]
        refused = f"{len(right) - passed[2]} of {len(right)}"
        return f"{name:12}{f'{passed[0]} of {len(cheats)}':>16}{f'{passed[1]} of {len(others)}':>20}{refused:>18}"

    lines.append(line("the gate", lambda row: row["status"] == "accepted"))
    lines += [
        line(check, lambda row, check=check: bool(row.get(check)))
        for check in ("allclose", "kernelbench", "assert_close")
    ]  # type: ignore[misc]
    lines += ["(accepted candidates; in the last column those that were refused)"]
    lines += [f"reason right: {len(named)} of {len(cheats)} cheating candidates"]
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", help="specimens or their authors, for example a/zeros or liger; default: all"
    )
    parser.add_argument("--out", default="gate.jsonl", help="a file to which the rows are added")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", help="a file for all rows, with the machine and the commit")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gate-alone", action="store_true", help="leave the other checks out")
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    finished = JsonRows(Path(arguments.out))
    known = {row["name"] for row in finished.rows}
    every = specimens.specimens(CHEATS) + specimens.specimens(RIGHT)
    asked = [s for s in every if not arguments.names or {s.name, s.path.parent.name} & set(arguments.names)]
    chosen = [s for s in asked if not s.missing(arguments.device)]
    for specimen in asked:
        if specimen not in chosen:
            print(f"{specimen.name}: not judged, because it needs {' and '.join(specimen.missing(arguments.device))}")
    by_name = {specimen.name: specimen for specimen in chosen}
    console = Console(stderr=True)
    open_ones = [specimen for specimen in chosen if specimen.name not in known]
    for row in track(
        rows(open_ones, arguments.jobs, arguments.device), "judging", total=len(open_ones), console=console
    ):
        alone = arguments.gate_alone or arguments.device != "cpu"
        finished.add({**row, **({} if alone else checks(by_name[str(row["name"])]))})
    shown = [row for row in finished.rows if row["name"] in by_name]
    for row in shown:
        if (row["status"] == "accepted") != bool(row["right"]):
            print(f"{row['name']}: {row['status']} {row['reason']}, expected {row['expected'][0]}")
    print(*table(shown), sep="\n")
    if arguments.json:
        kept = [
            {k: v for k, v in row.items() if k != "evidence"} for row in sorted(shown, key=lambda r: str(r["name"]))
        ]
        data = {**conditions(argv or sys.argv[1:], "score"), "rows": kept}
        if arguments.device == "cuda":
            data["machine"] = torch.cuda.get_device_name()
        Path(arguments.json).write_text(json.dumps(data, indent=1) + "\n")
    return int(any((row["status"] == "accepted") != bool(row["right"]) for row in shown))


if __name__ == "__main__":
    sys.exit(main())
