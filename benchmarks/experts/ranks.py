"""Experts on the CPU with LoRA, on several ranks of one host: the time of a step, and copies of the base in memory.

    python -m benchmarks.experts.ranks                    writes benchmarks/results/experts_ranks.json
    python -m benchmarks.experts.ranks --layers 1 --tokens 64 --steps 2 --out -     in a minute

The layers have the shape of Qwen3-30B-A3B's: 128 experts, 8 for each token. A step is the forward and backward of all
layers and the sum of the LoRA's gradients over the ranks; the tokens of a step are the same number for any ranks. Each
rank has its share of the processors. `base_gb` is the size of the packed bases, `mapped_gb` the memory that all ranks
together have of them (Pss of the mapped files, where a page that two processes map counts half for each). Times are
worth comparing only if `load_before`, the machine's load, is about 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import distributed

from goldsmith import experts
from goldsmith.assay.ranks import RankPool
from goldsmith.cli.bench.rows import Conditions
from goldsmith.core import processors
from goldsmith.distributed import machine_group, shared_base, sum_in_rank_order

SHAPE = {"E": 128, "H": 2048, "I": 768, "k": 8, "r": 16}
ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "experts_ranks.json"
GB = 1e9


def pack(format: str, layer: int) -> experts.PackedExperts:
    """Random weights, packed expert by expert."""
    E, H, I = (SHAPE[axis] for axis in "EHI")
    generator = torch.Generator().manual_seed(layer)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    return experts.pack((drawn(2 * I, H) for _ in range(E)), (drawn(H, I) for _ in range(E)), format=format)


def measure(layers: int, tokens: int, steps: int, format: str) -> dict[str, float]:
    """On a rank: the median time of a step, and this rank's part of the mapped bases."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    processors.bind(rank, world)
    E, H, I, k, r = (SHAPE[axis] for axis in "EHIkr")
    group = machine_group()
    torch.manual_seed(0)
    modules = []
    for number in range(layers):
        base = shared_base(lambda number=number: pack(format, number), group)  # type: ignore[misc]
        modules.append(experts.Experts(base, experts.LoRA(E, H, I, rank=r, dtype=torch.bfloat16)))
    parameters = [p for module in modules for p in module.parameters()]
    torch.manual_seed(rank)
    own = tokens // world
    x = torch.randn(own, H, dtype=torch.bfloat16)
    ids = [torch.rand(own, E).topk(k).indices for _ in modules]
    shares = torch.rand(own, k).softmax(-1)
    times = []
    for _ in range(1 + steps):
        distributed.barrier()
        start = time.perf_counter()
        y = x.clone().requires_grad_()
        for module, chosen in zip(modules, ids, strict=True):
            y = y + module(y, chosen, shares)
        y.float().square().mean().backward()
        sum_in_rank_order([p.grad for p in parameters if p.grad is not None], group)
        distributed.barrier()
        times.append(time.perf_counter() - start)
        for p in parameters:
            p.grad = None
    return {
        "seconds": statistics.median(times[1:]),
        "base": sum(module.base.nbytes for module in modules),  # type: ignore[union-attr]
        "mapped": mapped(),
    }


def mapped() -> int:
    """Bytes that this process has of the bases' files, shared pages counted in parts."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
            inside = "goldsmith-experts" in line
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def row(ranks: int, layers: int, tokens: int, steps: int, format: str) -> dict[str, object]:
    with RankPool(ranks, limit_s=1800.0) as pool:
        results = pool.run(measure, [(layers, tokens, steps, format)] * ranks)
    seconds = max(result["seconds"] for result in results)
    return {
        "ranks": ranks,
        "format": format,
        "layers": layers,
        "tokens": tokens,
        "step_ms": round(seconds * 1e3, 1),
        "tokens_per_s": round(tokens / seconds, 1),
        "base_gb": round(results[0]["base"] / GB, 3),
        "mapped_gb": round(sum(result["mapped"] for result in results) / GB, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--format", default="int4")
    parser.add_argument("--out", default=str(RESULT), help="a file, or - for stdout alone")
    options = parser.parse_args()
    rows, load = [], round(os.getloadavg()[0], 1)
    for ranks in options.ranks:
        rows.append(row(ranks, options.layers, options.tokens, options.steps, options.format))
        print(json.dumps(rows[-1]), flush=True)
    if options.out != "-":
        here = Conditions.here("cpu")
        content = {
            "machine": here.machine,
            "versions": ", ".join(f"{name} {version}" for name, version in here.versions.items()),
            "commit": here.commit,
            "case": ", ".join(f"{name}={size}" for name, size in SHAPE.items()),
            "command": " ".join(["python -m benchmarks.experts.ranks", *sys.argv[1:]]),
            "load_before": load,
            "rows": rows,
        }
        Path(options.out).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
