"""mhc.gated_pre: its declaration, argument checks and public function."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.op import Op
from ...core.shapes import check_dtype, check_same_device, check_shapes, check_tensor
from .._common import AXES, FLOATS, check_coefficient, check_numbers, check_streams, sum_dtype

GATED_PRE = Op(
    "mhc.gated_pre",
    schema="(Tensor x, Tensor gamma, Tensor down, Tensor up, Tensor? inject, float rms_eps, float post_mult) "
    "-> (Tensor h_in, Tensor h_post, Tensor inv_rms, Tensor h_mix)",
    saved=("inv_rms", "h_mix"),
    package=__package__,
    axes=AXES | {"down": "rank features", "up": "features rank", "inject": "n features", "inv_rms": "*batch n: sum"},
    backends=("triton",),
    grads=("x", "gamma", "down", "up", "inject"),
    stages=("inv_rms", "normed", "h_mix", "hidden", "gates", "h_post", "h_in")
    + ("dgates", "dhidden", "dm", "dnormed", "dx", "dgamma", "ddown", "dup", "dinject"),
    summary="gates the normalised streams and averages them to the layer's input",
)


def gated_pre(
    x: Tensor,
    gamma: Tensor,
    down: Tensor,
    up: Tensor,
    inject: Tensor | None = None,
    *,
    rms_eps: float = 1e-6,
    post_mult: float = 2.0,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """h_in = mean_i sigmoid(silu(Y down^T / n) up^T)[i] * y[i],  y[i] = gamma[i] * x[i] * rsqrt(mean(x[i]^2) + rms_eps)
    h_post = post_mult * sigmoid(Y inject^T / n)

    x [..., n, dim]; each stream has its own norm, and Y is y with its last two dimensions flattened. gamma [n*dim] or
    [n, dim], float32; down [rank, n*dim], up [n*dim, rank], inject [n, n*dim] in any floating-point dtype. Returns h_in
    [..., dim] in x's dtype (summed in float32, rounded once) and h_post [..., n] in float32 (float64 for float64 x);
    without inject only h_in, as the mixer at the model's end needs it. `mhc.inject` adds the layer's output.

    Differentiable in all five. Raises ShapeError, TypeError, ValueError, BackendUnavailable.
    Source: huggingface/transformers qwen4_exp, whose norm has the weight gamma - 1.
    """
    results = GATED_PRE(x, gamma, down, up, inject, rms_eps=rms_eps, post_mult=post_mult, backend=backend)
    return results[0] if inject is None else results


def check(
    x: Tensor, gamma: Tensor, down: Tensor, up: Tensor, inject: Tensor | None, *, rms_eps: float, post_mult: float
) -> None:
    op = GATED_PRE.name
    check_streams(op, "x", x)
    check_coefficient(op, "gamma", gamma, x)
    weights = {"down": down, "up": up} if inject is None else {"down": down, "up": up, "inject": inject}
    for name, weight in weights.items():
        check_tensor(op, name, weight)
        check_dtype(op, name, weight, FLOATS if x.dtype == torch.float64 else FLOATS[:3])
    n, dim = (int(size) for size in x.shape[-2:])
    patterns = {
        "x": f"*batch {n} {dim}",
        "gamma": f"{n} {dim}" if gamma.dim() == 2 else f"{n * dim}",
        "down": f"rank {n * dim}",
        "up": f"{n * dim} rank",
        "inject": f"{n} {n * dim}",
    }
    tensors = {"x": x, "gamma": gamma, **weights}
    check_shapes(
        op, {name: (t, patterns[name]) for name, t in tensors.items()}, hint="one column per stream and channel"
    )
    check_same_device(op, tensors)
    check_numbers(op, rms_eps=rms_eps, post_mult=post_mult)


def fake(
    x: Tensor, gamma: Tensor, down: Tensor, up: Tensor, inject: Tensor | None, **numbers: float
) -> tuple[Tensor, ...]:
    batch, n, to = x.shape[:-2], x.shape[-2], sum_dtype(x.dtype)
    injections = 0 if inject is None else n
    new = lambda *shape, dtype=to: torch.empty(shape, dtype=dtype, device=x.device)  # noqa: E731
    return (
        new(*batch, x.shape[-1], dtype=x.dtype),
        new(*batch, injections),
        new(*batch, n),
        new(*batch, down.shape[0] + injections),
    )
