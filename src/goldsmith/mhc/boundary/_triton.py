"""mhc.boundary on a GPU: post, then pre; and a backward that never writes x_next's gradient.

Bytes a token at n = 4 in elements: forward 9D + 4D + 5D; backward 5D (dots) + 19D + 4D (dphi).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...assay.stage import stage
from .._kernels import pipeline
from .._kernels.collapse import collapse_dots
from .._kernels.launch import dense, narrow, rows, streams
from .._kernels.gradient import stream_gradient_through_post
from .._kernels.mix import mix_forward


def unsupported(tensors: dict, options: dict) -> str | None:
    return pipeline.unsupported(tensors, options) or narrow(tensors["f"])


def forward(
    x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None,
    *, form: str, orientation: str, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    n = x.shape[-2]
    y = mix_forward(streams(x), rows(f), dense(h_post, -1, n), dense(h_res, -1, n, n), orientation)
    x_next = stage("x_next", y.reshape(x.shape))
    names = {"h_post": "h_post_next", "h_res": "h_res_next"}
    found = pipeline.forward(streams(x_next), phi, alpha, bias, gamma, collapsed=True, names=names, **options)
    return x_next, *pipeline.shaped(x, found, ("h_in", "h_post", "h_res", "inv_rms", "h_mix"))


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    y, x, f = streams(tensors["x_next"]), streams(tensors["x"]), rows(tensors["f"])
    T, n, _ = y.shape
    u = None if grads["h_in"] is None else rows(grads["h_in"])
    dh_pre = None if u is None else stage("dh_pre", collapse_dots(y, u))
    found = pipeline.coefficient_gradients(tensors, options, y, dh_pre, grads["h_post_next"], grads["h_res_next"])
    gamma = tensors["gamma"]
    dx, df, dh_res, dh_post = stream_gradient_through_post(
        y, found["dm"], found["kappa"], tensors["phi"].contiguous(), None if gamma is None else gamma.reshape(-1).contiguous(),
        u=u, h_pre=found["h_pre"], grad=None if grads["x_next"] is None else streams(grads["x_next"]), x=x, f=f,
        h_post=dense(tensors["h_post"], T, n), h_res=dense(tensors["h_res"], T, n, n), orientation=options["orientation"],
    )  # fmt: skip
    above = {"x": stage("dx_post", dx), "f": stage("df", df), "h_post": stage("dh_post", dh_post), "h_res": stage("dh_res", dh_res)}
    above = {name: g.reshape(tensors[name].shape) for name, g in above.items()}
    return above | pipeline.parameter_gradients(tensors, y, found)
