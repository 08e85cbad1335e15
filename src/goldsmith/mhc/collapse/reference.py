"""mhc.collapse in plain torch."""

from __future__ import annotations

from torch import Tensor

from ...core.tracing import stage
from .. import _formulas as formulas
from .._common import sum_dtype


def forward(x: Tensor, h_pre: Tensor) -> tuple[Tensor]:
    return (stage("h_in", formulas.collapse(h_pre.to(sum_dtype(x.dtype)), x)),)


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    x, h_pre = tensors["x"], tensors["h_pre"]
    u, dh_pre = formulas.collapse_gradient(grads["h_in"], x)
    dx = h_pre.to(u.dtype).unsqueeze(-1) * u.unsqueeze(-2)
    return {"x": stage("dx", dx.to(x.dtype)), "h_pre": stage("dh_pre", dh_pre.to(h_pre.dtype))}
