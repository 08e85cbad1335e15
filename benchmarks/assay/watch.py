"""The cost of `assay.watch` when small transformers are trained: `python -m benchmarks.assay.watch`.

Each model size is a width; a step is forward, backward and AdamW.
Variants take turns of ten steps, in reverse order every other round. A turn is one watch. Its first step, which costs
as much as with level="operators", is not timed, except with every=10, where it is one of the ten. The ratio is that of
the medians; the last columns are the lowest and highest ratio of a round. A CPU is timed in CPU time of this process,
which other work disturbs least; a GPU in wall time. --json FILE writes a row per size and variant;
`benchmarks/results/watch.json` holds those of docs/watch.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from goldsmith import assay

VARIANTS = {
    "off": None,
    "default": {},
    "norms=False": {"norms": False},
    "operators": {"level": "operators"},
    "operators, norms=False": {"level": "operators", "norms": False},
    "sync=False, norms=False": {"sync": False, "norms": False},
    "every=10": {"every": 10},
}


def main() -> int:
    arguments = _arguments()
    device = torch.device(arguments.device)
    torch.set_num_threads(arguments.threads)
    kept = []
    for dim in arguments.dim:
        rows = _measure(dim, arguments, device)
        _show(rows)
        kept += rows
    if arguments.json:
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


def _measure(dim: int, arguments: argparse.Namespace, device: torch.device) -> list[dict]:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, arguments.layers, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(arguments.batch, arguments.tokens, dim, device=device)
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(arguments.rounds + 1):
        for name, how in list(VARIANTS.items())[:: -1 if turn % 2 else 1]:
            watch = contextlib.nullcontext() if how is None else assay.watch(model, **how)
            with watch:
                if turn == 0 or how is None or how.get("every", 1) == 1:
                    _step(model, optimizer, x)  # the first step of a watch is judged operator by operator
                seconds = [_step(model, optimizer, x) for _ in range(arguments.steps)]
            if turn:  # the first round warms up
                times[name] += [sum(seconds) / len(seconds)]
    with OperatorCount() as operators:
        _step(model, optimizer, x)
    facts = {"dim": dim, "operators": operators.count}
    return [_row(name, times, arguments, device) | facts for name in VARIANTS]


class OperatorCount(TorchDispatchMode):
    """Counts the operators that a watch sees."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _show(rows: list[dict]) -> None:
    print(f"{'watch':<24}{'ms a step':>10}{'ratio':>8}{'from':>8}{'to':>8}")
    for row in rows:
        figures = "".join(f"{row[what]:>8.2f}" for what in ("ratio", "lowest", "highest"))
        print(f"{row['watch']:<24}{row['median_ms']:>10.2f}{figures}")
    first = rows[0]
    print(
        f"{first['machine']}, torch {first['torch']}, {first['threads']} thread(s); {first['layers']} layers, dim "
        f"{first['dim']}, {first['tokens']} tokens, {first['operators']} operators; "
        f"{first['clock']} time, medians of {first['rounds']} rounds\n",
        flush=True,
    )


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    clock = time.perf_counter if x.is_cuda else time.process_time
    started = clock()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return clock() - started


def _row(name: str, times: dict[str, list[float]], arguments: argparse.Namespace, device: torch.device) -> dict:
    ratios = [mine / off for mine, off in zip(times[name], times["off"], strict=True)]
    median, off = (statistics.median(times[which]) for which in (name, "off"))
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "watch": name, "median_ms": 1000 * median, "ratio": median / off,
        "lowest": min(ratios), "highest": max(ratios), "machine": gpu or _processor(),
        "clock": "wall" if gpu else "CPU", "torch": torch.__version__, "threads": torch.get_num_threads(),
        "layers": arguments.layers, "tokens": arguments.batch * arguments.tokens,
        "rounds": arguments.rounds, "steps": arguments.steps, "load": os.getloadavg()[0], "date": str(date.today()),
    }  # fmt: skip


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dim", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10, help="steps of a variant in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
