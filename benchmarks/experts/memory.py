"""Peak memory of a layer of experts with LoRA, forward and backward: ours in each format, and transformers under peft.

    python -m benchmarks.experts.memory                 writes benchmarks/results/experts_memory.json
    python -m benchmarks.experts.memory ours bf16 2048  prints one row, here for 2,048 tokens

Each variant runs in its own process. Three figures are taken: resident memory before the weights are made, resident
memory with the weights alone, and the peak during forward and backward of 256 tokens (VmHWM, reset before).
"""

import gc
import json
import subprocess
import sys
from pathlib import Path

import torch

from goldsmith import experts
from goldsmith.cli.bench.rows import Conditions

LAYER = {"E": 8, "H": 2048, "I": 1408, "k": 4, "T": 256, "r": 8}
FORMATS = ("bf16", "int8", "int4")
PEERS = ("eager", "grouped_mm")
ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "experts_memory.json"


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def stored(format: str) -> experts.PackedExperts:
    """Weights packed expert by expert, so that there is never a whole float copy."""
    E, H, I = (LAYER[axis] for axis in "EHI")
    gate_up = (torch.randn(2 * I, H) * H**-0.5 for _ in range(E))
    return experts.pack(gate_up, (torch.randn(H, I) * I**-0.5 for _ in range(E)), format=format)


def ours(format: str) -> dict:
    E, H, I, r = (LAYER[axis] for axis in "EHIr")
    experts.moe(
        torch.randn(1, 8), torch.zeros(1, 1).long(), torch.ones(1, 1), small()
    ).sum()  # loads what is loaded once
    before = resident("VmRSS")
    base = stored(format)
    lora = experts.LoRA(E, H, I, rank=r, dtype=torch.bfloat16)
    layer = experts.Experts(base, lora)
    return measured("ours", format, base.nbytes, before, layer, list(lora.parameters()))


def small() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 16, 8), torch.randn(1, 8, 8)


def peer(implementation: str) -> dict:
    from goldsmith.cli.bench.experts import MoeSubject
    from goldsmith.core.op import Op
    from goldsmith.experts import benchmarks

    from ..peers import transformers

    benchmarks.LAYERS["memory"] = {axis: LAYER[axis] for axis in "HIEk"}
    for layer in ("tiny", "memory"):  # the first pass loads libraries
        before = resident("VmRSS")
        entry = benchmarks._entry("memory", LAYER["T"], layer, "", LAYER["r"], train=True, on_cpu=True)
        model, leaves = transformers._experts(MoeSubject(Op.get("experts.moe"), entry, "cpu"), implementation)
    weights = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    return measured(f"transformers, {implementation}, peft", "bf16", weights, before, model, leaves)


def measured(who: str, format: str, weights: int, before: int, layer: torch.nn.Module, leaves: list) -> dict:
    T, H, E, k = (LAYER[axis] for axis in "THEk")
    x = torch.randn(T, H, dtype=torch.bfloat16, requires_grad=True)
    ids, shares = torch.rand(T, E).topk(k).indices, torch.rand(T, k, requires_grad=True)
    gc.collect()
    torch.clear_autocast_cache()
    trim()
    after = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    y = layer(x, ids, shares)
    torch.autograd.grad(y, [x, shares, *leaves], torch.ones_like(y))
    return {
        "who": who,
        "format": format,
        "weights": weights,
        "held": after - before,
        "peak": resident("VmHWM") - after,
    }


def trim() -> None:
    """Return freed memory from malloc to the system."""
    import ctypes

    ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    jobs = [("ours", format) for format in FORMATS] + [("peer", name) for name in PEERS]
    rows = []
    for job in jobs:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.experts.memory", *job],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    here = Conditions.here("cpu")
    sizes = ", ".join(f"{name}={size}" for name, size in LAYER.items())
    content = {
        "machine": here.machine,
        "versions": ", ".join(f"{name} {version}" for name, version in here.versions.items()),
        "commit": here.commit,
        "case": f"{sizes}, {torch.get_num_threads()} threads",
        "command": "python -m benchmarks.experts.memory",
        "rows": rows,
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        LAYER["T"] = int(sys.argv[3]) if len(sys.argv) > 3 else LAYER["T"]
        print(json.dumps({"ours": ours, "peer": peer}[sys.argv[1]](sys.argv[2])))
    else:
        main()
