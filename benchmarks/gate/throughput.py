"""What one candidate of a small problem costs the gate, and whether 1,000 hostile ones leave anything behind.

    python -m benchmarks.gate.throughput [--candidates N] [--jobs 2] [--json FILE]
    python -m benchmarks.gate.throughput --hostile [--candidates 1000] [--seconds 2]

The candidates are different right and wrong softmaxes. Wall times are those of `Judges`, the processes of `goldsmith
gate`, after a first candidate for each judge. Processor seconds are measured afterwards in a judge within this process:
a candidate's process is killed, so that only its judge can read them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from goldsmith.assay.gate import Candidate, GateOptions, Judges, Limits, ProblemSource, Verdict
from goldsmith.assay.gate.isolation.candidate_process import CandidateProcess
from goldsmith.assay.gate.isolation.limits import processor_seconds
from goldsmith.assay.gate.judge_process import CandidateJudge
from goldsmith.cli.bench.rows import commit
from goldsmith.core.device import machine

from . import hostile

PROBLEM = '''"""The problem of docs/gate.md."""

import torch
from goldsmith import assay


def golden(x, w):
    return torch.softmax(x, -1) * w


@assay.case(T=[1, 5], D=[12])
def cases(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}
'''
RIGHT = (
    "    return x.softmax(-1) * w",
    "    return torch.softmax(x, dim=-1).mul(w)",
    "    return w * torch.nn.functional.softmax(x, -1)",
    "    e = (x - x.amax(-1, keepdim=True)).exp()\n    return e / e.sum(-1, keepdim=True) * w",
)
WRONG = (
    "    return x.softmax(0) * w",
    "    return x.softmax(-1)",
    "    return x.softmax(-1) * w * {factor}",
    "    e = x.exp()\n    return e / e.sum(-1, keepdim=True) * w",
    "    return (x.softmax(-1) + {term}) * w",
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Made:
    """A candidate, and whether it is right."""

    candidate: Candidate
    right: bool


def made(count: int) -> list[Made]:
    """Right and wrong candidates in turns; no two sources are equal."""
    rows = []
    for number in range(count):
        right = number % 2 == 0
        bodies = RIGHT if right else WRONG
        body = bodies[number // 2 % len(bodies)].format(factor=1.5 + number, term=0.25 + number)
        source = f"import torch\n\nNUMBER = {number}\n\n\ndef candidate(x, w):\n{body}\n"
        rows.append(Made(Candidate(f"softmax_{number}", source), right))
    return rows


@contextmanager
def problem_file() -> Iterator[ProblemSource]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "problem.py"
        file.write_text(PROBLEM)
        yield ProblemSource(str(file))


def walls(every: Sequence[Made], jobs: int, options: GateOptions) -> tuple[list[Verdict], float]:
    """The verdicts, and the seconds that all of them took together, once every judge is warm."""
    with problem_file() as problem, Judges(jobs, options) as judges:
        warm = [Candidate(f"warm_{n}", RIGHT_SOURCE) for n in range(2 * jobs)]
        list(judges.run([(problem, candidate) for candidate in warm]))
        began = time.monotonic()
        verdicts = list(judges.in_order([(problem, m.candidate) for m in every]))
        return verdicts, time.monotonic() - began


RIGHT_SOURCE = f"import torch\n\n\ndef candidate(x, w):\n{RIGHT[0]}\n"


def processor(every: Sequence[Made], options: GateOptions) -> list[tuple[float, float]]:
    """(of the judge, of the candidate's process): processor seconds for each candidate."""
    spent = [0.0]
    close = CandidateProcess.close

    def closed(self: CandidateProcess, grace: float = 0.0) -> None:
        spent[0] += processor_seconds(self.pid) if self.pid else 0.0
        close(self, grace)

    CandidateProcess.close = closed  # type: ignore[method-assign]
    try:
        judge, rows = CandidateJudge(), []
        with problem_file() as problem:
            for candidate in (Candidate("warm", RIGHT_SOURCE), *(m.candidate for m in every)):
                spent[0], before = 0.0, time.process_time()
                judge.verdict(
                    {"candidate": candidate.to_json(), "problem": problem.to_json(), "options": options.to_json()}
                )
                rows.append((time.process_time() - before, spent[0]))
        return rows[1:]
    finally:
        CandidateProcess.close = close  # type: ignore[method-assign]


def measure(count: int, jobs: int, seed: int) -> Row:
    """All figures as a row for JSON."""
    options = GateOptions(seed=seed)
    every = made(count)
    load = os.getloadavg()[0]
    verdicts, took = walls(every, jobs, options)
    costs = processor(every[: min(count, 40)], options)
    false = [v.candidate for v, m in zip(verdicts, every, strict=True) if v.ok is not m.right]
    groups = {}
    for name, right in (("right", True), ("wrong", False)):
        seconds = sorted(v.seconds for v, m in zip(verdicts, every, strict=True) if m.right is right)
        spent = [c for c, m in zip(costs, every, strict=False) if m.right is right]
        groups[name] = {
            "candidates": len(seconds),
            "median": round(statistics.median(seconds), 3),
            "p90": round(seconds[int(0.9 * (len(seconds) - 1))], 3),
            "judge_processor": round(statistics.mean(c[0] for c in spent), 3),
            "candidate_processor": round(statistics.mean(c[1] for c in spent), 3),
        }
    return {
        "candidates": count,
        "jobs": jobs,
        "seconds": round(took, 2),
        "candidates_per_second": round(count / took, 2),
        **groups,
        "statuses": dict(Counter(v.status for v in verdicts)),
        "misjudged": false,
        "load_before": round(load, 1),
    }


def conditions(arguments: Sequence[str], module: str = "throughput") -> Row:
    here = machine()
    return {
        "command": " ".join([f"python -m benchmarks.gate.{module}", *arguments]),
        "commit": commit(),
        "machine": f"{here.cpu}, {here.cores} cores",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
    }


def lines(row: Row) -> list[str]:
    """The figures for people."""
    head = f"{'':8}{'candidates':>12}{'median':>10}{'p90':>10}{'judge CPU':>12}{'candidate CPU':>16}"
    rows = [head]
    for name in ("right", "wrong"):
        g = row[name]
        cells = f"{g['candidates']:>12}{g['median']:>9.3f}s{g['p90']:>9.3f}s{g['judge_processor']:>11.3f}s"
        rows.append(f"{name:8}{cells}{g['candidate_processor']:>15.3f}s")
    rate = f"{row['candidates_per_second']} candidates/s with {row['jobs']} judges"
    rows.append(f"{rate}, {row['seconds']} s in all; the load of the machine before was {row['load_before']}")
    if row["misjudged"]:
        rows.append(f"misjudged: {', '.join(row['misjudged'])}")
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=None, help="how many; default: 60, hostile: 1000")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="hostile: the limit of a call and of an import")
    parser.add_argument("--hostile", action="store_true", help="crashes, endless loops, forks, floods, memory hogs")
    parser.add_argument("--json", help="a file to which the figures are added, under the name of the mode")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `Judges` sets it
    torch.set_num_threads(1)
    name = "hostile" if arguments.hostile else "throughput"
    if arguments.hostile:
        with problem_file() as problem:
            limits = Limits(arguments.seconds, arguments.seconds, 1 << 30)
            options = GateOptions(limits=limits, seed=arguments.seed)
            row = hostile.run(problem, arguments.candidates or 1000, arguments.jobs, options)
        print(*hostile.lines(row), sep="\n")
        failed = bool(row["missing"] or row["left_processes"] or row["left_files"] or row["unexpected"])
    else:
        row = measure(arguments.candidates or 60, arguments.jobs, arguments.seed)
        print(*lines(row), sep="\n")
        failed = bool(row["misjudged"])
    if arguments.json:
        file = Path(arguments.json)
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**known, name: {**conditions(argv or sys.argv[1:]), **row}}, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
