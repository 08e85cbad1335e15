"""mhc.coefficients on a GPU: the first two kernels of mhc.pre, without the collapse to h_in."""

from __future__ import annotations

from torch import Tensor

from .._kernels import pipeline

LAUNCHES_ONLY = True
unsupported = pipeline.unsupported


def forward(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, *, form: str, **options: object
) -> tuple[Tensor, ...]:
    results = pipeline.forward(x, phi, alpha, bias, gamma, collapsed=False, **options)
    return tuple(results[name] for name in ("h_pre", "h_post", "h_res", "inv_rms", "h_mix"))


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    return pipeline.backward(tensors, options, h_pre=grads["h_pre"], h_post=grads["h_post"], h_res=grads["h_res"])
