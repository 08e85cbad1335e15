"""False alarms of the rungs above the bound, before confirmation, on random goldens, shapes, data and orders.

`python tests/assay/test_ladder_rates.py 3000` measures the rate that ladder_noise.py states, and the remaining margin.
"""

import random
import sys

import pytest
import torch

from assay.ladder_bench import BF16, F32, reference
from goldsmith.assay.judge.ladder import _Comparison, judge
from goldsmith.assay.noise import patterns
from goldsmith.assay.noise.ensemble import LegalOrder

STYLES = ("as_stored", "permuted", "tiles", "pairwise", "mixed", "torch", "wide")


def gradients(f):
    """A golden whose result is the gradient of its inputs, laid side by side."""

    def golden(leaves):
        own = [t.requires_grad_() for t in leaves.values()]
        out = f(*own)
        flat = torch.autograd.grad(out, own, torch.cos(torch.arange(out.numel())).to(out.dtype).reshape(out.shape))
        return torch.cat([g.reshape(-1) for g in flat])

    return golden


def norm(x, w):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def attend(x, w):
    return torch.softmax(x * w @ x.transpose(-1, -2) / x.shape[-1] ** 0.5, -1) @ x


GOLDENS = {
    "dot": lambda L: L["x"] @ L["w"],
    "sum": lambda L: L["x"].sum(-1),
    "square": lambda L: (L["x"] * L["x"]).mean(0),
    "norm": lambda L: norm(L["x"], L["w"]),
    "norm_backward": gradients(norm),
    "attend": lambda L: attend(L["x"], L["w"]),
    "attend_backward": gradients(attend),
    "logits": lambda L: torch.log_softmax(L["x"] * 3, -1) * L["w"],
    "swish": lambda L: torch.nn.functional.silu(L["x"]) * L["w"] + torch.expm1(L["x"] / 4),
    "running": lambda L: torch.cumsum(L["x"], -1),
}


def data(rng, generator, *shape):
    x = torch.randn(*shape, generator=generator)
    kind = rng.choice(["normal", "positive", "heavy", "sorted", "rows", "offset"])
    if kind == "positive":
        return x.abs()
    if kind == "heavy":
        return x**3
    if kind == "sorted":
        return x.sort(-1).values
    if kind == "offset":
        return x + 10
    scale = 4.0 ** torch.randint(-3, 4, (*shape[:-1], 1), generator=generator)
    return x * scale if kind == "rows" else x


def clean_run(seed, largest=14.0):
    """A random honest candidate compared with its reference: (its description, its comparison)."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    name, style = rng.choice(sorted(GOLDENS)), rng.choice(STYLES)
    store = rng.choice([F32, F32, BF16, torch.float16])
    dim = int(2 ** rng.uniform(1, min(largest, 7) if "attend" in name else largest))
    rows = max(1, min(rng.choice([1, 2, 7, 64, 300]), 2**20 // dim)) if "attend" not in name else rng.choice([1, 5, 40])
    leaves = {"x": data(rng, generator, rows, dim), "w": data(rng, generator, dim)}
    golden = GOLDENS[name]
    ref = reference(golden, leaves, store, seed=seed)
    own = {k: t.clone() for k, t in leaves.items()}
    if style == "torch":
        y = golden(own)
    elif style == "wide":  # a kernel that keeps everything in float64 until the store
        y = golden({k: t.double() for k, t in own.items()})
    else:
        with LegalOrder(style, F32, "ieee", seed + 77, list(own.values())):
            y = golden(own)
    what = f"{name} {style} {store} rows={rows} dim={dim}"
    return what, _Comparison("y", y.detach().to(store), ref)


def alarms(comparison):
    """(share of the bound, share of rung 2's limit, patterns): the alarms that a fresh seed would have to confirm."""
    noise = comparison.ref.noise
    excess = float(noise.excess(comparison.r).max()) / noise.limit() if noise.usable else 0.0
    return (
        comparison.ratio,
        excess,
        [p.text for p in patterns.error_patterns(comparison.r, comparison.ref.noise, comparison.ref.groups)]
        if noise.usable
        else [],
    )


@pytest.mark.parametrize("block", range(4))
def test_no_clean_run_is_beyond_its_bound_or_raises_an_alarm(block):
    for seed in range(block * 25, block * 25 + 25):
        what, comparison = clean_run(seed, largest=11.0)
        ratio, excess, alarm_texts = alarms(comparison)
        assert ratio <= 1.0 and excess <= 1.0 and not alarm_texts, (seed, what, ratio, excess, alarm_texts)
        assert judge("y", comparison.y.to(comparison.ref.store), comparison.ref).findings == []


@pytest.mark.slow
def test_no_clean_run_of_3000_raises_an_alarm():
    for seed in range(3000):
        what, comparison = clean_run(seed)
        ratio, excess, alarm_texts = alarms(comparison)
        assert ratio <= 1.0 and excess <= 1.0 and not alarm_texts, (seed, what, ratio, excess, alarm_texts)


def main(count, first=0):
    torch.set_num_threads(1)
    seen = []
    for seed in range(first, first + count):
        what, comparison = clean_run(seed)
        ratio, excess, alarm_texts = alarms(comparison)
        seen.append((excess, ratio, seed, what))
        if alarm_texts or ratio > 1 or excess > 1 or comparison.special:
            print(f"ALARM seed {seed}: {what}: bound {ratio:.3f}, noise {excess:.3f}, {alarm_texts}", flush=True)
    seen.sort(reverse=True)
    for excess, ratio, seed, what in seen[:10]:
        print(f"{excess:.3f} of rung 2's limit, {ratio:.3f} of the bound: seed {seed}, {what}")
    print(f"{count} clean runs; closest to the bound {max(s[1] for s in seen):.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
