"""A small bench for the ladder's tests: a golden, a candidate, and a judge that draws fresh seeds for confirmations."""

import torch

from goldsmith.assay.bounds.running_errors import running_bounds
from goldsmith.assay.golden.golden_tensor import GoldenTensor
from goldsmith.assay.judge.ladder import judge
from goldsmith.assay.noise.ensemble import legal_runs

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def matvec(leaves):
    return leaves["a"] @ leaves["b"]


def rms_norm(leaves):
    x = leaves["x"]
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * leaves["w"]


def draw_dot(k, m=64, n=4):
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return {"a": torch.randn(m, k, generator=generator), "b": torch.randn(k, n, generator=generator)}

    return draw


def draw_norm(rows=64, dim=128):
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return {"x": torch.randn(rows, dim, generator=generator), "w": torch.randn(dim, generator=generator)}

    return draw


def reference(golden, leaves, store, seed=0, compute=F32, dot="ieee", **extra):
    wide = {n: t.double() if t.is_floating_point() else t for n, t in leaves.items()}
    fn = lambda L: {"y": golden(L)}  # noqa: E731
    bounded = running_bounds(fn, wide, compute=compute, stores={"y": store}, dot=dot)["y"]
    members = legal_runs(fn, wide, compute=compute, stores={"y": store}, seed=seed, dot=dot)
    return GoldenTensor("y", "output", store, bounded, [m["y"] for m in members], compute=compute, **extra)


def verdict(golden, candidate, draw, store=F32, seed=0, **extra):
    """judge with confirmations; candidate(leaves in float32 or `inputs`) -> tensor."""

    def run(seed):
        leaves = draw(seed)
        return candidate(leaves), reference(golden, leaves, store, seed, **extra)

    got, ref = run(seed)
    return judge("y", got, ref, case="bench", confirm=lambda attempt: run(seed + 1000 * attempt))


def rungs(judgement):
    return [f.rung for f in judgement.findings]
