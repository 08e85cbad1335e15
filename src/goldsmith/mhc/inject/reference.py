"""mhc.inject in plain torch. G is the gradient of x_next."""

from __future__ import annotations

from torch import Tensor

from ...core.tracing import stage
from .._common import sum_dtype


def forward(x: Tensor, f: Tensor, h_post: Tensor) -> tuple[Tensor]:
    to = sum_dtype(x.dtype)
    added = stage("inject", h_post.to(to).unsqueeze(-1) * f.to(to).unsqueeze(-2))
    return (stage("x_next", (x.to(to) + added).to(x.dtype)),)


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    x, f, h_post = (tensors[name] for name in ("x", "f", "h_post"))
    to = sum_dtype(x.dtype)
    g = grads["x_next"].to(to)
    gradients = {
        "x": ("dx_post", g),
        "f": ("df", (h_post.to(to).unsqueeze(-1) * g).sum(-2)),
        "h_post": ("dh_post", (g * f.to(to).unsqueeze(-2)).sum(-1)),
    }
    return {name: stage(label, grad.to(tensors[name].dtype)) for name, (label, grad) in gradients.items()}
