"""mhc.sinkhorn: its declaration, argument checks and public function."""

from __future__ import annotations

from torch import Tensor

from ...core.op import Op
from ...core.shapes import check_dtype, check_shapes, check_tensor
from .._common import AXES, FLOATS, check_form, check_numbers

SINKHORN = Op(
    "mhc.sinkhorn",
    schema="(Tensor logits, int iterations, float eps, str form) -> (Tensor h_res)",
    package=__package__,
    axes=AXES | {"logits": "*batch n n"},
    backends=("triton",),
    grads=("logits",),
    stages=("h_res",),
    summary="turns n x n logits into (nearly) doubly stochastic matrices",
)


def sinkhorn(
    logits: Tensor, *, iterations: int = 20, eps: float = 1e-6, form: str = "deepseek", backend: str = "auto"
) -> Tensor:
    """P = softmax_rows(L) + eps;  P /= colsum(P) + eps
    then iterations-1 times:  P /= rowsum(P) + eps;  P /= colsum(P) + eps

    logits [..., n, n] (a row runs over the last index) -> [..., n, n] in float32 (float64 for float64 logits). The last
    step normalises columns: column sums are 1 to about 1e-6, while row sums of large logits are not (they miss 1 by
    5e-2 at a standard deviation of 3). The gradient is that of these steps, not of their fixed point.

    form="megatron": P = exp(L - rowmax); iterations times: P /= max(rowsum, eps); P /= max(colsum, eps).
    form="log" (TransformerEngine; ignores eps): f = g = 0; iterations times: f = -logsumexp_k(L + g[k]),
    g = -logsumexp_j(L + f[j]); P = exp(f + L + g). Both run on the reference only.

    Raises ShapeError for matrices that are not square, ValueError for iterations < 1, eps < 0 or an unknown form, and
    BackendUnavailable with the reason. Source: DeepSeek's published model code (form "deepseek"); Xie et al. 2026, mHC.
    """
    return SINKHORN(logits, iterations=iterations, eps=eps, form=form, backend=backend)


def check(logits: Tensor, *, iterations: int, eps: float, form: str) -> None:
    check_tensor("mhc.sinkhorn", "logits", logits)
    check_dtype("mhc.sinkhorn", "logits", logits, FLOATS)
    check_shapes("mhc.sinkhorn", {"logits": (logits, "*batch n n")}, hint="one square matrix per token")
    check_numbers("mhc.sinkhorn", iterations=iterations, eps=eps)
    check_form("mhc.sinkhorn", form)
