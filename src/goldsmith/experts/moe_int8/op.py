"""experts.moe_int8: declaration of the operator behind compute="int8"; separate because it has no gradient."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ...core.op import Op
from .._checks import check_int8, check_moe
from .._conventions import AXES, NAMES, TARGETS, MoeOptions

MOE_INT8 = Op(
    "experts.moe_int8",
    schema="(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, Tensor down, "
    "Tensor? gate_up_bias, Tensor? down_bias, Tensor? gate_a, Tensor? gate_b, Tensor? up_a, Tensor? up_b, "
    "Tensor? down_a, Tensor? down_b, Tensor? seed, str layout, float gate_scale, float up_scale, float down_scale, "
    "float dropout, str activation, float alpha, float? limit) -> (Tensor y)",
    package=__package__,
    axes=AXES,
    numbered="seed",
    backends=("native",),
    stages=("g", "u", "h", "o", "y")
    + tuple(
        f"{target}_{part}"
        for target in TARGETS
        for part in ("codes", "code_scales", "product", "a_read", "b_read", "masked", "low", "lora")
    ),
    summary="experts.moe with integer products; inference",
    internal=True,
)


def check(*tensors: Tensor | None, **options: Unpack[MoeOptions]) -> None:
    check_moe("experts.moe", dict(zip(NAMES, tensors, strict=True)), options)
    check_int8("experts.moe", options["layout"])
