"""Checks torch's own functions on a CPU in float32, bfloat16 and float16, to count false alarms.

`python -m benchmarks.assay.rates_torch [NAME ...]`. Each function is its own golden, which runs in float64. In 16 bits
each is checked twice: as a kernel that computes in float32, which many of torch's functions do not, and with `compute`
declared as the dtype. Exit status 1 where a finding is a false alarm: any finding in float32 or with `compute`
declared, and in 16 bits a finding without the hint about that declaration.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from goldsmith import assay

T, D = 6, 40
HEADS = (2, 3, 8, 16)


@dataclass(frozen=True)
class Integers:
    """Random integers in [0, high)."""

    high: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Distinct:
    """Random integers in [0, high), all different within a row."""

    high: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Between:
    """Random numbers in [0, 1)."""

    shape: tuple[int, ...]


def drawn(make: Any, shape: Any) -> torch.Tensor:
    if isinstance(shape, Integers):
        return make.integers(0, shape.high, *shape.shape)
    if isinstance(shape, Distinct):
        rows, width = shape.shape
        return torch.stack([torch.randperm(shape.high, generator=make.generator)[:width] for _ in range(rows)])
    return make.uniform(*shape.shape) if isinstance(shape, Between) else make.normal(*shape)


def eye(x: torch.Tensor) -> torch.Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype)


X: dict[str, Any] = {"x": (T, D)}
XY: dict[str, Any] = {"x": (T, D), "y": (T, D)}
QKV: dict[str, Any] = {"q": HEADS, "k": HEADS, "v": HEADS}
FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "exp": (lambda x: torch.exp(x), X),
    "log": (lambda x: torch.log(x.abs() + 0.1), X),
    "log1p": (lambda x: torch.log1p(x.abs()), X),
    "expm1": (lambda x: torch.expm1(x), X),
    "tanh": (lambda x: torch.tanh(x), X),
    "sigmoid": (lambda x: torch.sigmoid(x), X),
    "sin": (lambda x: torch.sin(x), X),
    "cos": (lambda x: torch.cos(x), X),
    "tan": (lambda x: torch.tan(0.5 * x), X),
    "atan": (lambda x: torch.atan(x), X),
    "sinh": (lambda x: torch.sinh(x), X),
    "asinh": (lambda x: torch.asinh(x), X),
    "sqrt": (lambda x: torch.sqrt(x.abs()), X),
    "rsqrt": (lambda x: torch.rsqrt(x.abs()), X),
    "reciprocal": (lambda x: torch.reciprocal(x), X),
    "erf": (lambda x: torch.erf(x), X),
    "erfc": (lambda x: torch.erfc(x), X),
    "exp2": (lambda x: torch.exp2(x), X),
    "square": (lambda x: torch.square(x), X),
    "pow3": (lambda x: x**3, X),
    "clamp": (lambda x: x.clamp(-1, 1), X),
    "sign": (lambda x: torch.sign(x), X),
    "lgamma": (lambda x: torch.lgamma(x.abs() + 1), X),
    "digamma": (lambda x: torch.digamma(x.abs() + 1), X),
    "relu": (lambda x: F.relu(x), X),
    "relu6": (lambda x: F.relu6(x), X),
    "leaky": (lambda x: F.leaky_relu(x, 0.1), X),
    "elu": (lambda x: F.elu(x), X),
    "selu": (lambda x: F.selu(x), X),
    "celu": (lambda x: F.celu(x), X),
    "gelu": (lambda x: F.gelu(x), X),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), X),
    "silu": (lambda x: F.silu(x), X),
    "mish": (lambda x: F.mish(x), X),
    "softplus": (lambda x: F.softplus(x), X),
    "logsigmoid": (lambda x: F.logsigmoid(x), X),
    "hardswish": (lambda x: F.hardswish(x), X),
    "hardsigmoid": (lambda x: F.hardsigmoid(x), X),
    "hardtanh": (lambda x: F.hardtanh(x), X),
    "hardshrink": (lambda x: F.hardshrink(x), X),
    "softshrink": (lambda x: F.softshrink(x), X),
    "tanhshrink": (lambda x: F.tanhshrink(x), X),
    "softsign": (lambda x: F.softsign(x), X),
    "threshold": (lambda x: F.threshold(x, 0.1, 0.0), X),
    "glu": (lambda x: F.glu(x), X),
    "prelu": (lambda x: F.prelu(x, torch.full((1,), 0.25, dtype=x.dtype)), X),
    "softmax": (lambda x: F.softmax(x, -1), X),
    "log_softmax": (lambda x: F.log_softmax(x, -1), X),
    "softmax0": (lambda x: F.softmax(x, 0), X),
    "softmin": (lambda x: F.softmin(x, -1), X),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), X),
    "normalize": (lambda x: F.normalize(x, dim=-1), X),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (D,), w, b), {"x": (T, D), "w": (D,), "b": (D,)}),
    "layer_norm_plain": (lambda x: F.layer_norm(x, (D,)), X),
    "rms_norm": (lambda x, w: F.rms_norm(x, (D,), w, 1e-06), {"x": (T, D), "w": (D,)}),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), {"x": (3, 8, 10), "w": (8,), "b": (8,)}),
    "instance_norm": (lambda x: F.instance_norm(x), {"x": (3, 4, 10)}),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        {"x": (8, 5), "w": (5,), "b": (5,)},
    ),
    "local_response_norm": (lambda x: F.local_response_norm(x, 3), {"x": (2, 6, 8)}),
    "mse": (lambda x, y: F.mse_loss(x, y), XY),
    "l1": (lambda x, y: F.l1_loss(x, y), XY),
    "smooth_l1": (lambda x, y: F.smooth_l1_loss(x, y), XY),
    "huber": (lambda x, y: F.huber_loss(x, y), XY),
    "cross_entropy": (lambda x, i: F.cross_entropy(x, i), {"x": (T, D), "i": Integers(D, (T,))}),
    "nll": (lambda x, i: F.nll_loss(F.log_softmax(x, -1), i), {"x": (T, D), "i": Integers(D, (T,))}),
    "ce_smooth": (lambda x, i: F.cross_entropy(x, i, label_smoothing=0.1), {"x": (T, D), "i": Integers(D, (T,))}),
    "bce_logits": (lambda x, y: F.binary_cross_entropy_with_logits(x, y), {"x": (T, D), "y": Between((T, D))}),
    "bce": (lambda x, y: F.binary_cross_entropy(torch.sigmoid(x), y), {"x": (T, D), "y": Between((T, D))}),
    "kl": (lambda x, y: F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction="batchmean"), XY),
    "cosine": (lambda x, y: F.cosine_similarity(x, y), XY),
    "poisson": (lambda x, y: F.poisson_nll_loss(x, y), {"x": (T, D), "y": Between((T, D))}),
    "hinge": (lambda x, y: F.hinge_embedding_loss(x, torch.where(y > 0, 1.0, -1.0).to(x.dtype)), XY),
    "margin": (lambda x, y: F.margin_ranking_loss(x, y, torch.ones_like(x)), {"x": (T,), "y": (T,)}),
    "triplet": (lambda x, y, z: F.triplet_margin_loss(x, y, z), {"x": (T, D), "y": (T, D), "z": (T, D)}),
    "ctc_free_pdist": (lambda x: F.pairwise_distance(x, torch.zeros_like(x)), X),
    "matmul": (lambda a, b: a @ b, {"a": (5, 40), "b": (40, 7)}),
    "mv": (lambda a, b: a @ b, {"a": (5, 40), "b": (40,)}),
    "bmm": (lambda a, b: torch.bmm(a, b), {"a": (2, 5, 24), "b": (2, 24, 7)}),
    "einsum": (lambda a, b: torch.einsum("bik,bjk->bij", a, b), {"a": (2, 5, 24), "b": (2, 7, 24)}),
    "linear": (lambda x, w, b: F.linear(x, w, b), {"x": (T, D), "w": (9, D), "b": (9,)}),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), {"c": (5, 7), "a": (5, 24), "b": (24, 7)}),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b), {"c": (2, 5, 7), "a": (2, 5, 24), "b": (2, 24, 7)}),
    "outer": (lambda a, b: torch.outer(a, b), {"a": (9,), "b": (7,)}),
    "bilinear": (lambda x, y, w: F.bilinear(x, y, w), {"x": (4, 6), "y": (4, 5), "w": (3, 6, 5)}),
    "kron": (lambda a, b: torch.kron(a, b), {"a": (3, 4), "b": (2, 5)}),
    "cdist": (lambda a, b: torch.cdist(a, b), {"a": (5, 8), "b": (4, 8)}),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 2), {"a": (5, 4, 6), "b": (4, 6, 3)}),
    "vdot": (lambda a, b: torch.dot(a, b), {"a": (40,), "b": (40,)}),
    "cross": (lambda a, b: torch.linalg.cross(a, b), {"a": (6, 3), "b": (6, 3)}),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), {"x": (2, 3, 16), "w": (4, 3, 3), "b": (4,)}),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), {"x": (2, 3, 8, 8), "w": (4, 3, 3, 3)}),
    "convT": (lambda x, w: F.conv_transpose1d(x, w, stride=2), {"x": (2, 3, 8), "w": (3, 4, 3)}),
    "conv_group": (lambda x, w: F.conv1d(x, w, groups=4), {"x": (2, 4, 16), "w": (4, 1, 3)}),
    "unfold": (lambda x: F.unfold(x, 3), {"x": (2, 3, 6, 6)}),
    "fold": (lambda x: F.fold(x, (4, 4), 2), {"x": (2, 8, 9)}),
    "sdpa": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), QKV),
    "sdpa_causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), QKV),
    "sdpa_mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        {"q": HEADS, "k": HEADS, "v": HEADS, "m": (8, 8)},
    ),
    "sdpa_boolmask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m > 0),
        {"q": HEADS, "k": HEADS, "v": HEADS, "m": Integers(3, (8, 8))},
    ),
    "sdpa_gqa": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        {"q": (2, 4, 8, 16), "k": (2, 2, 8, 16), "v": (2, 2, 8, 16)},
    ),
    "sdpa_kv": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        {"q": (1, 2, 5, 16), "k": (1, 2, 20, 16), "v": (1, 2, 20, 16)},
    ),
    "attn_manual": (lambda q, k, v: torch.softmax(q @ k.mT * 0.25, -1) @ v, QKV),
    "cumsum": (lambda x: x.cumsum(-1), X),
    "cumprod": (lambda x: (1 + 0.1 * x).cumprod(-1), X),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), X),
    "cummax": (lambda x: x.cummax(-1).values, X),
    "sum": (lambda x: x.sum(-1), X),
    "mean": (lambda x: x.mean(0), X),
    "var": (lambda x: x.var(-1), X),
    "std": (lambda x: x.std(-1), X),
    "prod": (lambda x: (1 + 0.1 * x).prod(-1), X),
    "amax": (lambda x: x.amax(-1), X),
    "max": (lambda x: x.max(-1).values, X),
    "norm1": (lambda x: torch.linalg.vector_norm(x, 1, -1), X),
    "norm2": (lambda x: x.norm(dim=-1), X),
    "norm3": (lambda x: torch.linalg.vector_norm(x, 3, -1), X),
    "median": (lambda x: x.median(-1).values, X),
    "diff": (lambda x: x.diff(dim=-1), X),
    "nansum": (lambda x: x.nansum(-1), X),
    "trapz": (lambda x: torch.trapezoid(x), X),
    "aminmax": (lambda x: x.amin(-1) + x.amax(-1), X),
    "logaddexp": (lambda x: torch.logaddexp(x, 0.5 * x), X),
    "gather": (lambda x, i: x.gather(-1, i), {"x": (T, D), "i": Integers(D, (T, 8))}),
    "scatter": (
        lambda x, i: torch.zeros_like(x).scatter(-1, i.sort(-1).values, x[:, :8]),
        {"x": (T, D), "i": Distinct(D, (T, 8))},
    ),
    "scatter_add": (lambda x, i, s: x.scatter_add(-1, i, s), {"x": (T, D), "i": Integers(D, (T, 8)), "s": (T, 8)}),
    "index_add": (lambda x, i, s: x.index_add(0, i, s), {"x": (T, D), "i": Integers(T, (9,)), "s": (9, D)}),
    "index_select": (lambda x, i: x.index_select(0, i), {"x": (T, D), "i": Integers(T, (9,))}),
    "index": (lambda x, i: x[i], {"x": (T, D), "i": Integers(T, (9,))}),
    "index_put": (
        lambda x, i, s: x.index_put((i,), s, accumulate=True),
        {"x": (T, D), "i": Integers(T, (9,)), "s": (9, D)},
    ),
    "scatter_reduce": (
        lambda x, i, s: x.scatter_reduce(-1, i, s, "mean"),
        {"x": (T, D), "i": Integers(D, (T, 8)), "s": (T, 8)},
    ),
    "segment_amax": (
        lambda x, i, s: x.scatter_reduce(-1, i, s, "amax"),
        {"x": (T, D), "i": Integers(D, (T, 8)), "s": (T, 8)},
    ),
    "masked_fill": (lambda x: x.masked_fill(x > 1, 0.0), X),
    "where": (lambda x, y: torch.where(x > y, x, y * 2), XY),
    "take_along": (lambda x, i: torch.take_along_dim(x, i, -1), {"x": (T, D), "i": Integers(D, (T, 8))}),
    "sort": (lambda x: x.sort(-1).values, X),
    "topk": (lambda x: x.topk(5, -1).values, X),
    "flip": (lambda x: x.flip(-1), X),
    "roll": (lambda x: x.roll(3, -1), X),
    "tril": (lambda x: x.tril(), X),
    "repeat": (lambda x: x.repeat(2, 1), X),
    "cat": (lambda x: torch.cat([x, 2 * x]), X),
    "pad": (lambda x: F.pad(x, (1, 2)), X),
    "pad_reflect": (lambda x: F.pad(x[None], (2, 2), mode="reflect"), X),
    "kthvalue": (lambda x: x.kthvalue(3, -1).values, X),
    "embedding": (lambda i, w: F.embedding(i, w), {"i": Integers(12, (9,)), "w": (12, 16)}),
    "embedding_bag": (lambda i, w: F.embedding_bag(i, w, mode="mean"), {"i": Integers(12, (4, 5)), "w": (12, 16)}),
    "embedding_bag_sum": (lambda i, w: F.embedding_bag(i, w, mode="sum"), {"i": Integers(12, (4, 5)), "w": (12, 16)}),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), {"x": (2, 3, 8, 8)}),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), {"x": (2, 3, 8, 8)}),
    "adaptive_avg": (lambda x: F.adaptive_avg_pool2d(x, 3), {"x": (2, 3, 8, 8)}),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 3, 2), {"x": (2, 3, 16)}),
    "max_pool1d": (lambda x: F.max_pool1d(x, 3, 2), {"x": (2, 3, 16)}),
    "lp_pool": (lambda x: F.lp_pool1d(x.abs(), 2, 2), {"x": (2, 3, 16)}),
    "adaptive_max": (lambda x: F.adaptive_max_pool1d(x, 3), {"x": (2, 3, 16)}),
    "interp_nearest": (lambda x: F.interpolate(x, scale_factor=2), {"x": (2, 3, 5, 5)}),
    "interp_bilinear": (lambda x: F.interpolate(x, size=(7, 9), mode="bilinear"), {"x": (2, 3, 5, 5)}),
    "interp_linear": (lambda x: F.interpolate(x, size=9, mode="linear", align_corners=True), {"x": (2, 3, 5)}),
    "interp_bicubic": (lambda x: F.interpolate(x, size=(7, 9), mode="bicubic"), {"x": (1, 2, 5, 5)}),
    "interp_area": (lambda x: F.interpolate(x, size=(3, 3), mode="area"), {"x": (1, 2, 7, 7)}),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), {"x": (1, 8, 3, 3)}),
    "grid_sample": (
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
        {"x": (1, 2, 5, 5), "g": (1, 4, 4, 2)},
    ),
    "inv": (lambda x: torch.linalg.inv(x + 6 * eye(x)), {"x": (6, 6)}),
    "solve": (lambda x, b: torch.linalg.solve(x + 6 * eye(x), b), {"x": (6, 6), "b": (6, 3)}),
    "cholesky": (lambda x: torch.linalg.cholesky(x @ x.mT + eye(x)), {"x": (6, 6)}),
    "det": (lambda x: torch.linalg.det(x + 4 * eye(x)), {"x": (4, 4)}),
    "slogdet": (lambda x: torch.linalg.slogdet(x + 4 * eye(x)).logabsdet, {"x": (4, 4)}),
    "eigvalsh": (lambda x: torch.linalg.eigvalsh(x + x.mT), {"x": (6, 6)}),
    "svdvals": (lambda x: torch.linalg.svdvals(x), {"x": (6, 4)}),
    "qr_r": (lambda x: torch.linalg.qr(x).R, {"x": (6, 4)}),
    "tri_solve": (
        lambda x, b: torch.linalg.solve_triangular(x.tril() + 4 * eye(x), b, upper=False),
        {"x": (6, 6), "b": (6, 3)},
    ),
    "matrix_exp": (lambda x: torch.matrix_exp(0.1 * x), {"x": (5, 5)}),
    "matrix_power": (lambda x: torch.linalg.matrix_power(0.5 * x, 3), {"x": (5, 5)}),
    "pinv": (lambda x: torch.linalg.pinv(x), {"x": (6, 3)}),
    "trace": (lambda x: x.trace(), {"x": (5, 5)}),
    "swiglu": (lambda a, b: F.silu(a) * b, {"a": (T, D), "b": (T, D)}),
    "rope": (
        lambda x, f: torch.cat(
            [x[..., :20] * f.cos() - x[..., 20:] * f.sin(), x[..., 20:] * f.cos() + x[..., :20] * f.sin()], -1
        ),
        {"x": (T, D), "f": (T, 20)},
    ),
    "mlp": (lambda x, w, v: F.gelu(x @ w) @ v, {"x": (T, 24), "w": (24, 32), "v": (32, 8)}),
}
# torch lacks these operators in 16 bits on a CPU; its matrix_exp of bfloat16 and float16 is NaN or about 10^30
NOT_IN_16_BITS = (
    "cdist", "inv", "solve", "cholesky", "det", "slogdet", "eigvalsh", "svdvals", "qr_r", "tri_solve", "pinv",
    "matrix_exp",
)  # fmt: skip
HINT = "if it is meant to, declare"


def verdict(name: str, dtype: torch.dtype, compute: torch.dtype | None, seed: int) -> dict[str, Any]:
    """One check as a row. Its state is `right`, `told` (every finding has the hint) or `accused`."""
    function, shapes = FUNCTIONS[name]
    case = assay.case()(lambda make: {n: drawn(make, shape) for n, shape in shapes.items()})
    target = assay.Target(function, function, cases=case, name=name, dtypes=(dtype,), compute=compute)
    report = assay.check(target, seed=seed, raises=False)
    texts = [f"{f.rung} {f.probe} {f.text}" for f in report.findings if f.rung != "QUALITY"]
    state = "right" if report.ok else "told" if texts and all(HINT in text for text in texts) else "accused"
    spelt = [str(d).removeprefix("torch.") for d in (dtype, compute) if d is not None]
    how = f"{spelt[0]}, compute={spelt[1]}" if compute else spelt[0]
    return {"name": name, "how": how, "seed": seed, "state": state, "findings": texts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="functions (default: all)")
    parser.add_argument("--seeds", type=int, default=1, help="checks of each (default 1)")
    parser.add_argument("--json", type=Path, help="write what was accused to this file")
    arguments = parser.parse_args()
    unknown = [n for n in arguments.names if n not in FUNCTIONS]
    if unknown:
        parser.error(f"no function {unknown[0]!r}; there are: {', '.join(FUNCTIONS)}")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    counts: dict[str, Counter[str]] = {}
    rows = []
    for name in arguments.names or FUNCTIONS:
        narrow = () if name in NOT_IN_16_BITS else (torch.bfloat16, torch.float16)
        for dtype, compute in [(torch.float32, None), *((d, c) for d in narrow for c in (None, d))]:
            for seed in range(arguments.seeds):
                row = verdict(name, dtype, compute, seed)
                counts.setdefault(row["how"], Counter())[row["state"]] += 1
                false_alarm = row["state"] == "accused" or (row["state"] == "told" and ", " in row["how"])
                if row["state"] != "right":
                    rows.append({**row, "false_alarm": false_alarm})
                if false_alarm:
                    print(f"{name} {row['how']} seed {seed}: {row['state']}: {'; '.join(row['findings'])[:400]}")
    for how, states in counts.items():
        output = ", ".join(f"{states[s]} {s}" for s in ("right", "told", "accused") if states[s])
        print(f"{how:<28} {sum(states.values())} checks: {output}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"counts": counts, "rows": rows}, indent=1) + "\n")
    return 1 if any(r["false_alarm"] for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
