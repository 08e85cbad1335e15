"""Measures the times that goldsmith promises against their limits: `python -m benchmarks.promises [plan] [generate]`.

    plan       a plan of 256 experts on one core, the quickest of many                                  50 us
    generate   `goldsmith generate` with the model in examples/, from the shell, with every import       10 s

Tests limit the amount of work (tests/offload/test_plan.py, tests/cli/test_generate.py). This script limits the time,
and needs an idle machine. For `generate` it also shows the processor time. Exit status 1 where a limit is exceeded.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PLANS = 10_000
GENERATE = ("generate", str(ROOT / "examples" / "shakespeare-moe"), "--device", "cpu", "--prompt", "O",
            "--max-new-tokens", "24")  # fmt: skip


def plan() -> tuple[float, float, str]:
    """(seconds of the quickest plan, limit, remark)."""
    import numpy as np

    from goldsmith.offload import Costs
    from goldsmith.offload import plan as planned

    cpu = [(n, 8e-5 + 2e-6 * n) for n in (1, 4, 16, 32, 64, 128, 256)]
    costs = Costs(  # an expert of Qwen3-30B in bfloat16, with curves, and lower rates where lanes share memory
        expert_bytes=9_437_184, flops_per_token=9_437_184, cpu_bytes_per_s=104e9, cpu_flops=2e12,
        link_bytes_per_s=50e9, dram_bytes_per_s=150e9, device_bytes_per_s=2e12, device_flops=3e14, cpu_latency=2e-5,
        link_latency=1e-5, device_latency=2e-5, cpu_curve=cpu, cpu_beside_curve=[(n, 2 * t) for n, t in cpu],
        device_curve=[(n, t / 50) for n, t in cpu], link_beside_bytes_per_s=45e9,
    )  # fmt: skip
    counts, cached = np.arange(1, 257) % 60 + 1, frozenset(range(0, 256, 4))
    quickest = float("inf")
    for _ in range(PLANS):
        began = time.perf_counter()
        planned(counts, cached, costs)
        quickest = min(quickest, time.perf_counter() - began)
    return quickest, 50e-6, f"the quickest of {PLANS}"


def generate() -> tuple[float, float, str]:
    """(seconds of the command, limit, remark)."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    subprocess.run(
        [sys.executable, "-m", "goldsmith", *GENERATE], check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, 10.0, f"{spent:.1f} s of processors"


PROMISES: dict[str, Callable[[], tuple[float, float, str]]] = {"plan": plan, "generate": generate}


def main(wanted: Sequence[str]) -> int:
    unknown = [name for name in wanted if name not in PROMISES]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; there are: {', '.join(PROMISES)}")
    broken = 0
    for name in wanted or PROMISES:
        seconds, limit, remark = PROMISES[name]()
        broken += seconds > limit
        kept = "kept" if seconds <= limit else "BROKEN"
        print(f"{name:<10} {_with_unit(seconds):>9} of {_with_unit(limit):>8}  {kept}  ({remark})")
    return 1 if broken else 0


def _with_unit(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e6:.0f} us"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
