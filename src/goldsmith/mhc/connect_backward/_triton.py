"""mhc.connect_backward on a GPU: pre's backward, whose last pass adds post's share of dx from the gradient of x_next.

Elements moved per token at n = 4: 5D (dots) + 5D + 4D (gradient of x_next) + 4D (dx).
"""

from __future__ import annotations

from torch import Tensor

from .._formulas import as_results
from .._kernels import pipeline

LAUNCHES_ONLY = True
unsupported = pipeline.unsupported


def forward(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, h_res: Tensor | None, inv_rms: Tensor,
    h_mix: Tensor, grad_h_in: Tensor | None, grad_h_post: Tensor | None, grad_h_res: Tensor | None,
    grad_x_next: Tensor | None,
    *, orientation: str, **options: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    tensors = {"x": x, "phi": phi, "alpha": alpha, "bias": bias, "gamma": gamma, "inv_rms": inv_rms, "h_mix": h_mix}
    gradients = pipeline.backward(
        tensors, options, u=grad_h_in, h_post=grad_h_post, h_res=grad_h_res,
        grad=grad_x_next, mixing=h_res, orientation=orientation,
    )  # fmt: skip
    return as_results(gradients, tensors)
