"""router.product_topk: its declaration, argument checks and public function."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.op import Op
from ...core.shapes import ShapeError, check_choice, check_dtype, check_same_device, check_tensor
from .._common import FLOATS, check_count, check_flag, same_dtype, sum_dtype

WEIGHTS = ("none", "exp", "softmax")
SUMS = ("float32", "float64")
MOST_PAIRS = 2**31 - 1  # indices are int32

PRODUCT_TOPK = Op(
    "router.product_topk",
    schema="(Tensor x, Tensor y, int k, bool log_softmax, str weights, str sums) "
    "-> (Tensor scores, Tensor indices, Tensor lse)",
    saved=("lse",),
    residuals=("x", "y", "scores", "indices", "lse"),
    package=__package__,
    axes={"x": "*batch sx", "y": "*batch sy", "scores": "*batch k: sum", "indices": "*batch k: int32"},
    backends=("triton",),
    grads=("x", "y"),
    stages=("rank_x", "rank_y", "candidates", "indices", "sums", "scores", "dsums", "dscores_x", "dscores_y"),
    summary="the k pairs of two logit vectors with the largest sums",
)


def product_topk(
    x: Tensor, y: Tensor, k: int, *, log_softmax: bool = False, weights: str = "none", backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """(scores, indices) of the k pairs (i, j) with the largest S[i, j] = x[i] + y[j];   indices = i * sy + j

        s = S[i, j], with log_softmax minus (logsumexp(x) + logsumexp(y))
        weights="none"       scores = s
        weights="exp"        scores = exp(s)
        weights="softmax"    scores = exp(s) / sum of exp(s) over the k; log_softmax then changes nothing

    x [..., sx], y [..., sy] with equal leading dimensions, both in bfloat16, float16, float32 or float64 -> scores
    [..., k] in float32 (float64 for float64), indices [..., k] in int32, best first. 1 <= k <= sx * sy <= 2^31 - 1.

    The order is total, so indices are the same on every backend: by S (rounded to float32) descending, then by the rank
    of i in a stable descending sort of x, then by the rank of j in y. Neither log_softmax nor weights changes an index.
    NaN counts as the largest number. Pairs that contain -inf come last and are masked: index -1, s = -inf, weight 0, no
    gradient. A row's results depend only on that row, bit for bit. Differentiable once in x and y; the selection has no
    gradient.

    Raises ShapeError, TypeError, ValueError, BackendUnavailable. Source: Lample et al. 2019, arXiv 1907.05242; He 2024,
    arXiv 2407.04153; OmniMoE, arXiv 2602.05711.
    """
    sums = "float64" if isinstance(x, Tensor) and x.dtype == torch.float64 else "float32"
    return PRODUCT_TOPK(x, y, k=k, log_softmax=log_softmax, weights=weights, sums=sums, backend=backend)


def check(x: Tensor, y: Tensor, *, k: int, log_softmax: bool, weights: str, sums: str) -> None:
    op = "router.product_topk"
    for name, tensor in (("x", x), ("y", y)):
        check_tensor(op, name, tensor)
        check_dtype(op, name, tensor, FLOATS)
        if tensor.dim() == 0 or tensor.shape[-1] == 0:
            raise ShapeError(f"{op}: {name} is {list(tensor.shape)}, expected [*batch, s{name}] with s{name} >= 1")
    same_dtype(op, [("x", x), ("y", y)])
    check_same_device(op, {"x": x, "y": y})
    if x.shape[:-1] != y.shape[:-1]:
        raise ShapeError(
            f"{op}: x is {list(x.shape)} and y is {list(y.shape)}; leading dimensions must agree "
            "(nothing is broadcast: use expand)"
        )
    sx, sy = x.shape[-1], y.shape[-1]
    check_count(op, "k", k, f" and at most sx * sy = {sx} * {sy}")
    if sx * sy > MOST_PAIRS:
        raise ValueError(f"{op}: sx * sy = {sx} * {sy} is more than 2^31 - 1 pairs, the limit of int32 indices")
    if k > sx * sy:
        raise ValueError(f"{op}: k={k}, but there are only sx * sy = {sx} * {sy} = {sx * sy} pairs")
    check_flag(op, "log_softmax", log_softmax)
    check_choice(op, "weights", weights, WEIGHTS)
    check_choice(op, "sums", sums, SUMS if x.dtype == torch.float64 else SUMS[:1])


def fake(x: Tensor, y: Tensor, *, k: int, log_softmax: bool, weights: str, sums: str) -> tuple[Tensor, ...]:
    batch, to = x.shape[:-1], sum_dtype(x.dtype)
    lse = (*batch, 2) if keeps_lse(log_softmax, weights) else (0,)
    return (
        torch.empty((*batch, k), dtype=to, device=x.device),
        torch.empty((*batch, k), dtype=torch.int32, device=x.device),
        torch.empty(lse, dtype=to, device=x.device),
    )


def keeps_lse(log_softmax: bool, weights: str) -> bool:
    """Whether the result depends on the rows' logsumexp, which cancels in a softmax over the k."""
    return log_softmax and weights != "softmax"
