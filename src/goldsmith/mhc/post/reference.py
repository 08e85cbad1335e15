"""mhc.post in plain torch. G is the gradient of x_next."""

from __future__ import annotations

from torch import Tensor

from ...core.tracing import stage
from .._common import sum_dtype


def forward(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, *, orientation: str) -> tuple[Tensor]:
    to = sum_dtype(x.dtype)
    mix = stage("mix", output_by_input(h_res.to(to), orientation) @ x.to(to))
    inject = stage("inject", h_post.to(to).unsqueeze(-1) * f.to(to).unsqueeze(-2))
    return (stage("x_next", (mix + inject).to(x.dtype)),)


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    x, f, h_post, h_res = (tensors[name] for name in ("x", "f", "h_post", "h_res"))
    to = sum_dtype(x.dtype)
    g = grads["x_next"].to(to)
    mixing = output_by_input(h_res.to(to), options["orientation"])
    gradients = {
        "f": (h_post.to(to).unsqueeze(-1) * g).sum(-2),
        "h_post": (g * f.to(to).unsqueeze(-2)).sum(-1),
        "h_res": output_by_input(g @ x.to(to).mT, options["orientation"]),
        "x": mixing.mT @ g,
    }
    return {name: stage(_NAMES[name], grad.to(tensors[name].dtype)) for name, grad in gradients.items()}


_NAMES = {"f": "df", "h_post": "dh_post", "h_res": "dh_res", "x": "dx_post"}  # dx_post: pre adds its own share of dx


def output_by_input(h_res: Tensor, orientation: str) -> Tensor:
    """Converts between [input, output] and [output, input] for "in_out"; "out_in" needs no conversion."""
    return h_res.mT if orientation == "in_out" else h_res
