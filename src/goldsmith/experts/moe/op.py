"""experts.moe: declaration of the operator, and its public function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from ...core.op import Op
from ...core.shapes import check_choice
from .._arguments import Base, Lora, base_of, limit_of, lora_of, needs_gradient
from .._checks import check_moe
from .._conventions import AXES, BASE, COMPUTE, FACTORS, NAMES, PARTS, TARGETS, MoeOptions, finite
from .._weights import sizes
from ..moe_int8.op import MOE_INT8

MOE = Op(
    "experts.moe",
    schema="(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, Tensor down, "
    "Tensor? gate_up_bias, Tensor? down_bias, Tensor? gate_a, Tensor? gate_b, Tensor? up_a, Tensor? up_b, "
    "Tensor? down_a, Tensor? down_b, Tensor? seed, str layout, float gate_scale, float up_scale, float down_scale, "
    "float dropout, str activation, float alpha, float? limit, bool save) "
    "-> (Tensor y, Tensor g, Tensor u)",
    saved=("g", "u"),
    package=__package__,
    axes=AXES,
    expert_axis=("experts", "topk_ids"),
    numbered="seed",
    backends=("native", "cuda_grouped"),
    grads=("x", "topk_weights", *BASE, *FACTORS),
    stages=("g", "u", "h", "o", "y", "q", "v", "dh", "dg", "du")
    + tuple(f"{target}_{part}" for target in TARGETS for part in PARTS)
    + tuple(f"d{name}" for name in ("x", "topk_weights", *BASE, *FACTORS)),
    summary="the selected experts of a token, with LoRA, weighed and summed",
)


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    base: Base,
    *,
    lora: Lora | None = None,
    lora_scaling: float | Mapping[str, float] = 1.0,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float | None = None,
    compute: str = "float",
    backend: str = "auto",
) -> Tensor:
    """y = sum_j weights[j] * (Wd h_j + bd + L_d(h_j)),   h_j = act(Wg x + bg + L_g(x), Wu x + bu + L_u(x))

    Wg, Wu, Wd, bg, bu, bd and L belong to expert topk_ids[j]; L(v) = scaling * B A v. x [..., H] in bfloat16, float16,
    float32 or float64 -> y [..., H] in x's dtype, summed in float32 and rounded once. topk_ids [..., k] in int32 or
    int64: 0 <= id < E, or -1 to skip the slot; an expert that a token lists twice counts twice. topk_weights [..., k]
    in float32 or x's dtype; they are not normalised here.

    base          a PackedExperts, or plain tensors (gate_up [E, 2I, H], down [E, H, I]), optionally followed by
                  gate_up_bias [E, 2I] and down_bias [E, H]. Rows 0..I-1 of gate_up belong to the gate
    lora          an experts.LoRA, or {"gate" | "up" | "down": (A [E, r, in], B [E, out, r])}, each with any rank and
                  its own dtype; read through its strides at every call. lora_scaling: a number, or one for each key
    activation    "silu": silu(g) u; "gelu", "gelu_tanh": gelu(g) u; "relu2": relu(g)^2 u; "swiglu_oai":
                  g sigmoid(alpha g) (u + 1) with limit 7 unless given
    limit         g = min(g, limit), u = clamp(u, -limit, limit) before the activation; no gradient beyond it
    compute       "float"; "int8" is for inference over a base in int8, int4 or int4_asym: x and h are rounded to 8 bits
                  per token and group (scale = amax / 127, ties to even), integer products are exact, and their sums
                  are scaled at the end. LoRA uses the unrounded x and h. A group with NaN or Inf makes its token NaN

    Differentiable in x, topk_weights, A, B and plain base tensors; only requested gradients are computed. If any is
    requested, the forward saves g and u in x's dtype, 2 k I elements per token; otherwise nothing. An expert without
    tokens has a gradient of exactly 0. A NaN stays in its token's row of y and dx and in that token's experts. Every
    backend repeats bit for bit.

    Raises ShapeError, TypeError, ValueError, BackendUnavailable. An id out of range raises ValueError with its index;
    on a GPU, to avoid a synchronisation, it is skipped instead, and the token's y and dx are NaN.
    """
    gate_up, down, gate_up_bias, down_bias, layout = base_of("experts.moe", base)
    factors, scales, dropout, seed = lora_of("experts.moe", lora, lora_scaling)
    tensors = (x, topk_ids, topk_weights, gate_up, down, gate_up_bias, down_bias, *factors)
    save = needs_gradient(tensors)
    options: dict[str, Any] = dict(
        layout=layout, gate_scale=scales[0], up_scale=scales[1], down_scale=scales[2], dropout=dropout,
        activation=activation, alpha=finite("experts.moe", "alpha", alpha),
        limit=limit_of("experts.moe", limit, activation), backend=backend,
    )  # fmt: skip
    check_choice("experts.moe", "compute", compute, COMPUTE)
    if compute == "float":
        return MOE(*tensors, seed, **options, save=save)
    if save:
        raise ValueError("experts.moe: compute='int8' has no gradient; call it under torch.no_grad(), or use 'float'")
    return MOE_INT8(*tensors, seed, **options)


def check(*tensors: Tensor | None, **options: Unpack[MoeOptions]) -> None:
    check_moe("experts.moe", dict(zip(NAMES, tensors, strict=True)), options)


def fake(x: Tensor, topk_ids: Tensor, *tensors: Tensor, **options: Unpack[MoeOptions]) -> tuple[Tensor, ...]:
    gate_up, down = tensors[1:3]
    _, _, inner = sizes(gate_up, down, options["layout"])
    shape = (topk_ids.numel(), inner) if options["save"] else (0,)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, *(torch.empty(shape, dtype=x.dtype, device=x.device) for _ in "gu")
