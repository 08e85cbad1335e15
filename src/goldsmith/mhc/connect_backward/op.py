"""mhc.connect_backward: its declaration and argument checks.

Internal: `HyperConnection` calls it in place of pre's backward (see ../_connection.py). Post's backward then skips its
share of dx, and this operator mixes the gradient of x_next itself (an independent connection has no h_res and mixes
nothing). A connection's backward thus moves 56*dim bytes per
token at n=4 in bfloat16 instead of 80*dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.op import Op
from .._common import AXES, MIX_GRADIENTS, PRE_GRADIENT_STAGES, check_form, check_mixing, check_numbers, check_rms_form

CONNECT_BACKWARD = Op(
    "mhc.connect_backward",
    schema="(Tensor x, Tensor phi, Tensor alpha, Tensor bias, Tensor? gamma, "
    "Tensor? h_res, Tensor inv_rms, Tensor h_mix, "
    "Tensor? grad_h_in, Tensor? grad_h_post, Tensor? grad_h_res, Tensor? grad_x_next, "
    "float pre_eps, float post_mult, int iterations, float sinkhorn_eps, str form, str orientation, str rms_form) "
    "-> (Tensor dx, Tensor dphi, Tensor dalpha, Tensor dbias, Tensor dgamma)",
    package=__package__,
    axes=AXES,
    backends=("triton",),
    stages=(*PRE_GRADIENT_STAGES, "post", *MIX_GRADIENTS),
    summary="the backward of pre, with post's share of dx added",
    internal=True,
)


def check(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    h_res: Tensor | None,
    *rest: Tensor | None,
    orientation: str,
    form: str,
    rms_form: str,
    **numbers: float,
) -> None:
    check_mixing("mhc.connect_backward", x, phi, alpha, bias, gamma, groups=2 if h_res is None else 3)
    check_form("mhc.connect_backward", form)
    check_rms_form("mhc.connect_backward", rms_form)
    check_numbers("mhc.connect_backward", **numbers)


def fake(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, *rest: Tensor | None, **options: object
) -> tuple[Tensor, ...]:
    like = (x, phi, alpha, bias, alpha[:0] if gamma is None else gamma)
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in like)
