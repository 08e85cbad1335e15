"""What a small Triton kernel costs the gate on a GPU beyond its compile time.

    python -m benchmarks.gate.triton_cost [--candidates N] [--json FILE]

The same softmax kernel is judged in two forms by one warm judge, in turns: as it is, so that Triton compiles it anew,
and with a cache of compiled kernels that an earlier candidate has filled. The difference of the medians is the compile
time of its kernels and launchers; the second median is the rest. Then a judge without spares does the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from goldsmith.assay.gate import Candidate, GateOptions, Judges, ProblemSource, Verdict

from .throughput import PROBLEM, conditions

KERNEL = """
import torch
import triton
import triton.language as tl

NUMBER = {number}


@triton.jit
def kernel(x_ptr, w_ptr, y_ptr, D, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * D + d, mask=d < D, other=-float("inf"))
    e = tl.exp(x - tl.max(x))
    y = e / tl.sum(e) * tl.load(w_ptr + d, mask=d < D, other=0.0)
    tl.store(y_ptr + tl.program_id(0) * D + d, y, mask=d < D)


def candidate(x, w):
    x, w = x.contiguous(), w.contiguous()
    y = torch.empty_like(x)
    kernel[(x.shape[0],)](x, w, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y
"""


def measure(count: int, seed: int) -> dict[str, Any]:
    """Seconds from a candidate's start to its verdict, as a row for JSON."""
    with tempfile.TemporaryDirectory() as folder:
        problem, cache = Path(folder) / "problem.py", Path(folder) / "cache"
        problem.write_text(PROBLEM + "\n\nbackward = None\n")
        cache.mkdir()
        kept = f"import os\n\nos.environ['TRITON_CACHE_DIR'] = {str(cache)!r}\n"
        forms = {"compiled": "", "kept": kept}
        seconds, refused = _seconds(problem, forms, count, seed, spares=True)
        others, more = _seconds(problem, forms, count, seed, spares=False)
    whole, rest = (statistics.median(seconds[name]) for name in ("compiled", "kept"))
    return {
        "machine": torch.cuda.get_device_name(),
        "candidates": count,
        "seconds": round(whole, 2),
        "spread": [round(min(seconds["compiled"]), 2), round(max(seconds["compiled"]), 2)],
        "compile": round(whole - rest, 2),
        "rest": round(rest, 2),
        "without_spares": {"seconds": _median(others["compiled"]), "rest": _median(others["kept"])},
        "refused": refused + more,
    }


def _seconds(
    problem: Path, forms: Mapping[str, str], count: int, seed: int, *, spares: bool
) -> tuple[dict[str, list[float]], list[str]]:
    """Seconds of each form's candidates, which one judge gets in turns, and sentences about those not accepted."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    refused: list[str] = []
    with Judges(1, GateOptions(seed=seed, device="cuda"), spares=spares) as judges:

        def verdict(name: str, number: int) -> Verdict:
            candidate = Candidate(f"{name}_{number}", forms[name] + KERNEL.format(number=number))
            return next(iter(judges.in_order([(ProblemSource(str(problem)), candidate)])))

        for name in forms:  # the judge's first candidates also pay for the golden and for CUDA
            verdict(name, 0)
        for number in range(count):
            for name in forms:
                began = time.perf_counter()
                found = verdict(name, number if name == "compiled" else 0)
                seconds[name].append(time.perf_counter() - began)
                if not found.ok:
                    refused.append(f"{name}_{number}: {found.status}, {found.reason}, {found.evidence[:1]}")
    return seconds, refused


def _median(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds), 2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="a file to which the figures are added, under the name triton")
    arguments = parser.parse_args(argv)
    row = measure(arguments.candidates, arguments.seed)
    low, high = row["spread"]
    print(f"{row['seconds']} s a candidate ({low} to {high}): {row['compile']} s to compile, {row['rest']} s the rest")
    other = row["without_spares"]
    print(f"without spares {other['seconds']} s, {other['rest']} s of it the rest")
    print(*row["refused"], sep="\n")
    if arguments.json:
        file = Path(arguments.json)
        known = json.loads(file.read_text()) if file.exists() else {}
        more = {"triton": {**conditions(list(argv or sys.argv[1:]), "triton_cost"), **row}}
        file.write_text(json.dumps({**known, **more}, indent=1) + "\n")
    return int(bool(row["refused"]))


if __name__ == "__main__":
    sys.exit(main())
