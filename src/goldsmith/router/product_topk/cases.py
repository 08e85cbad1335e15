"""Cases and benchmark sizes of router.product_topk."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...assay.declare.case import Case, Make
from ...core.bench import BenchCase

NAN, INF = math.nan, math.inf
SPECIAL = {"masked": (-INF,), "zeros": (0.0, -0.0), "not_finite": (-INF, INF, NAN, -NAN)}  # -NAN: another bit pattern


def logits(make: Make, *shape: int, fill: str) -> Tensor:
    """Logits by fill: "normal", "tied" (eight levels), or "masked", "zeros", "not_finite" with about half special"""
    if fill == "tied":
        return make.tied(*shape)
    drawn = make.normal(*shape)
    if fill == "normal":
        return drawn
    special = torch.tensor(SPECIAL[fill], dtype=drawn.dtype, device=drawn.device)
    which = make.integers(0, 2 * len(special), *shape)
    return torch.where(which < len(special), special[which % len(special)], drawn)


def inputs(
    make: Make,
    T: int | tuple[int, ...],
    sx: int,
    sy: int,
    k: int,
    fill: str = "normal",
    std: float = 1.0,
    lost: bool = False,
    weights: str = "none",
    log_softmax: bool = False,
) -> dict[str, object]:
    """Inputs and options of product_topk; T: a number of rows, or all leading dimensions; lost: x[0], y[1] are -inf."""
    batch = T if isinstance(T, tuple) else (T,)
    x, y = (logits(make, *batch, size, fill=fill) * std for size in (sx, sy))
    if lost:
        x[0], y[1] = -INF, -INF
    sums = "float64" if make.dtype == torch.float64 else "float32"
    return {"x": x, "y": y, "k": k, "log_softmax": log_softmax, "weights": weights, "sums": sums}


_CASES: dict[str, tuple[dict[str, object], str]] = {
    "no_rows": ({"T": 0, "sx": 5, "sy": 3, "k": 4}, "empty outputs and empty gradients"),
    "one_row": ({"T": 1, "sx": 8, "sy": 8, "k": 4}, "decoding"),
    "published": (
        {"T": 13, "sx": 16, "sy": 16, "k": 8, "weights": "exp", "log_softmax": True},
        "OmniMoE's released router: log-softmax of both axes, weights exp, not normalised over the k",
    ),
    "softmax": (
        {"T": 9, "sx": 7, "sy": 11, "k": 5, "weights": "softmax", "log_softmax": True},
        "axes of two lengths, neither a power of two; the log-softmax cancels in the softmax over the k",
    ),
    "log_softmax": ({"T": 3, "sx": 33, "sy": 5, "k": 6, "log_softmax": True}, "scores are log-probabilities of pairs"),
    "exp": ({"T": 5, "sx": 3, "sy": 9, "k": 4, "weights": "exp"}, "weights of raw sums"),
    "tied": ({"T": 9, "sx": 24, "sy": 20, "k": 12, "fill": "tied"}, "sums on fifteen levels: nearly all of them tie"),
    "all_equal": (
        {"T": 3, "sx": 6, "sy": 6, "k": 7, "fill": "tied", "std": 0.0, "weights": "softmax"},
        "all sums tie, so the ranks decide the order",
    ),
    "signed_zeros": ({"T": 5, "sx": 9, "sy": 9, "k": 10, "fill": "zeros"}, "+0 and -0 are equal, and tie"),
    "masked": (
        {"T": 9, "sx": 7, "sy": 6, "k": 30, "fill": "masked", "weights": "softmax"},
        "rows with fewer than k finite pairs: -1, weight 0, no gradient",
    ),
    "masked_log_softmax": (
        {"T": 6, "sx": 5, "sy": 4, "k": 12, "fill": "masked", "log_softmax": True},
        "a masked score is -inf and adds nothing to the gradient of the logsumexp",
    ),
    "nothing_left": (
        {"T": 3, "sx": 5, "sy": 4, "k": 6, "lost": True, "weights": "exp", "log_softmax": True},
        "a whole axis is -inf: all pairs are masked, logsumexp is -inf, softmax is 0 and not NaN",
    ),
    "not_finite": (
        {"T": 13, "sx": 7, "sy": 8, "k": 9, "fill": "not_finite"},
        "NaN is the largest number, -inf wins over it; indices stay in range",
    ),
    "not_finite_weights": (
        {"T": 7, "sx": 5, "sy": 6, "k": 7, "fill": "not_finite", "weights": "softmax"},
        "NaN where the formula gives NaN, and in no other row",
    ),
    "not_finite_masked": (
        {"T": 7, "sx": 3, "sy": 4, "k": 12, "fill": "not_finite", "weights": "softmax"},
        "masked entries have weight 0 also in a row with NaN",
    ),
    "k_above_s": ({"T": 3, "sx": 4, "sy": 5, "k": 11, "fill": "tied"}, "k exceeds both axes: ranks end before k does"),
    "every_pair": ({"T": 2, "sx": 3, "sy": 5, "k": 15, "weights": "softmax"}, "k = sx * sy: a full sort"),
    "many_chunks": (
        {"T": 34, "sx": 70, "sy": 100, "k": 32, "fill": "tied", "weights": "exp", "log_softmax": True},
        "logits are read in chunks of 32, rows in blocks of 32; the last of each is almost all mask",
    ),
    "long_lists": ({"T": 2, "sx": 70, "sy": 9, "k": 33, "weights": "softmax"}, "k exceeds the longest list of a lane"),
    "one_column": ({"T": 5, "sx": 1, "sy": 13, "k": 6}, "one axis has one entry: a plain top-k"),
    "one_pair": ({"T": 1, "sx": 1, "sy": 1, "k": 1, "log_softmax": True}, "all sizes are 1: the only pair has score 0"),
    "best_pair": ({"T": 6, "sx": 12, "sy": 17, "k": 1, "weights": "softmax"}, "k = 1: weight 1, gradient 0"),
    "odd_sizes": ({"T": 4, "sx": 129, "sy": 65, "k": 65}, "one past powers of two: tails of every block"),
    "heads": ({"T": (2, 3, 4), "sx": 9, "sy": 9, "k": 5, "weights": "softmax"}, "leading dimensions, heads among them"),
    "no_leading_dimension": ({"T": (), "sx": 8, "sy": 6, "k": 5, "weights": "exp"}, "one row without a batch"),
    "far_apart": (
        {"T": 5, "sx": 8, "sy": 8, "k": 6, "std": 30.0, "weights": "softmax"},
        "weights of very different size need the shift by the maximum",
    ),
    "usual": ({"T": 4096, "sx": 256, "sy": 256, "k": 32, "weights": "softmax"}, "65,536 experts"),
    "million": (
        {"T": 1024, "sx": 1024, "sy": 1024, "k": 64, "weights": "exp", "log_softmax": True},
        "a million experts, more ranks than any one block",
    ),
    "tied_million": ({"T": 512, "sx": 1024, "sy": 1023, "k": 128, "fill": "tied"}, "the longest list, with many ties"),
}
_EVERY_PROBE = ("softmax", "log_softmax")
_LARGE = ("usual", "million", "tied_million")


def _tags(name: str) -> tuple[str, ...]:
    return ("every_probe",) * (name in _EVERY_PROBE) + ("large",) * (name in _LARGE)


CASES = [Case(name, inputs, sizes, why, _tags(name)) for name, (sizes, why) in _CASES.items()]


def _bench(T: int, s: int, k: int, dtype: torch.dtype) -> BenchCase:
    sizes = {"T": T, "sx": s, "sy": s, "k": k, "weights": "exp", "log_softmax": True}
    why = "forward: reads both logits, writes k scores and indices; backward: the same, and reads the logits again"
    case = Case(f"route[T={T},s={s},k={k}]", inputs, sizes, why)
    on_cpu = dtype == torch.float32 and T < 10_000
    logit_bytes = 2 * s * T * dtype.itemsize
    moved = logit_bytes + 8 * T * k, 2 * logit_bytes + 8 * T * k
    return BenchCase(case.name, sizes, dtype, case.build, *moved, why, on_cpu=on_cpu, replayed=True)


BENCH = [
    _bench(4096, 256, 32, torch.bfloat16),
    _bench(4096, 256, 32, torch.float32),
    _bench(16384, 256, 32, torch.bfloat16),
    _bench(16384, 512, 32, torch.bfloat16),
    _bench(16384, 1024, 32, torch.bfloat16),
    _bench(16384, 1024, 64, torch.bfloat16),
    _bench(16384, 1024, 64, torch.float32),
]
