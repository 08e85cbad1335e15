"""experts.slots: declaration of the operator, and its public function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor

from ...core.autograd import plain
from ...core.op import Op
from ...core.shapes import ShapeError, check_dtype, check_same_device, check_tensor
from .._arguments import Base, Lora, base_of, limit_of, lora_of, needs_gradient
from .._checks import check_moe
from .._conventions import AXES, SLOT_NAMES, TARGETS, MoeOptions, finite, wide

SLOTS = Op(
    "experts.slots",
    schema="(Tensor x, Tensor topk_ids, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias, "
    "Tensor? gate_a, Tensor? gate_b, Tensor? up_a, Tensor? up_b, Tensor? down_a, Tensor? down_b, "
    "str layout, float gate_scale, float up_scale, float down_scale, str activation, float alpha, float? limit) "
    "-> (Tensor o, Tensor flags)",
    package=__package__,
    axes=AXES,
    expert_axis=("experts", "topk_ids"),
    backends=("native",),
    stages=("g", "u", "h", "o")
    + tuple(f"{target}_{part}" for target in TARGETS for part in ("product", "a_read", "b_read", "low", "lora")),
    summary="the output of each slot's expert, one row per slot; inference",
)


def slots(
    x: Tensor,
    topk_ids: Tensor,
    base: Base,
    *,
    lora: Lora | None = None,
    lora_scaling: float | Mapping[str, float] = 1.0,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float | None = None,
    out: Tensor | None = None,
    flags: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """o[j] = Wd h_j + bd + L_d(h_j): the output of expert topk_ids[j] as in `experts.moe`, not weighted and not summed

    x [..., H], topk_ids [..., k] -> o [..., k, H] in float32 (float64 if x is float64); 0 where the id is -1. base,
    lora and the keywords are those of `experts.moe`; dropout is never applied.

    out     a contiguous tensor of o's shape and dtype, which is overwritten and returned
    flags   a uint8 tensor [..., k], which is set to 1 where a row has NaN or Inf, and to 0 elsewhere

    Inference only: raises ValueError if an argument requires a gradient. Raises ShapeError, TypeError, ValueError and
    BackendUnavailable like `experts.moe`.
    """
    op = "experts.slots"
    gate_up, down, gate_up_bias, down_bias, layout = base_of(op, base)
    factors, scales, _, _ = lora_of(op, lora, lora_scaling, training=False)
    tensors = (x, topk_ids, gate_up, down, gate_up_bias, down_bias, *factors)
    if needs_gradient((*tensors, out)):
        raise ValueError(f"{op}: has no gradient; call it under torch.no_grad(), or use experts.moe")
    options = dict(
        layout=layout, gate_scale=scales[0], up_scale=scales[1], down_scale=scales[2], activation=activation,
        alpha=finite(op, "alpha", alpha), limit=limit_of(op, limit, activation),
    )  # fmt: skip
    if out is None and flags is None:
        return SLOTS(*tensors, **options, backend=backend)[0]
    SLOTS.check(*tensors, **options)
    shape, dtype = (*topk_ids.shape, x.shape[-1]), wide(x.dtype)
    _check_result("out", out, shape, dtype, x)
    _check_result("flags", flags, topk_ids.shape, torch.uint8, x)
    if _directly(tensors, options, backend, out, flags):
        o = torch.empty(shape, dtype=dtype, device=x.device) if out is None else out
        SLOTS.backend("native").into(o, flags, *tensors, **options)
        _increment([t for t in (out, flags) if t is not None])
        return o
    o, computed = SLOTS(*tensors, **options, backend=backend)
    if flags is not None:
        flags.copy_(computed)
    return o if out is None else out.copy_(o)


def _directly(
    tensors: tuple[Tensor | None, ...],
    options: dict[str, object],
    backend: str,
    out: Tensor | None,
    flags: Tensor | None,
) -> bool:
    """Whether the CPU kernels can write directly to out and flags; otherwise the results are copied."""
    places = [t for t in (out, flags) if t is not None]
    if torch.compiler.is_compiling() or not plain((*tensors, *places)) or any(t.is_neg() for t in places):
        return False
    if SLOTS.choose(backend, tensors, options) != "native":
        return False
    read = {t.untyped_storage().data_ptr() for t in tensors if t is not None}
    return not any(t.untyped_storage().data_ptr() in read for t in places)


def _increment(written: list[Tensor]) -> None:
    """Tell autograd that these tensors were written, because it has not seen the kernel's writes."""
    for tensor in written:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _check_result(name: str, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, x: Tensor) -> None:
    op = "experts.slots"
    if tensor is None:
        return
    check_tensor(op, name, tensor)
    if tensor.shape != shape:
        raise ShapeError(f"{op}: {name} is {list(tensor.shape)}, expected {list(shape)}")
    check_dtype(op, name, tensor, (dtype,))
    check_same_device(op, {"x": x, name: tensor})
    if not tensor.is_contiguous():
        raise ValueError(f"{op}: {name} is not contiguous; pass a contiguous tensor")


def check(*tensors: Tensor | None, **options: Unpack[MoeOptions]) -> None:
    check_moe("experts.slots", dict(zip(SLOT_NAMES, tensors, strict=True)), options)
