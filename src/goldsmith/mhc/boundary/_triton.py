"""mhc.boundary on a GPU: post, then pre; backward pre, whose last pass adds the gradient of x_next, then post.

Bytes a token at n = 4 in elements: forward 9D + 9D; backward 5D (dots) + 13D (x_next) + 4D (dphi) + 14D (post). One
kernel that hands x_next's gradient to post's backward in registers saves 9D of it and is slower: its 20 dots a token
beside the tiles spill (760 us against 330 + 319 at T = 8192, D = 4096, H100).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...core.tracing import stage
from .._kernels import pipeline
from .._kernels.launch import dense, narrow, rows, shaped, streams
from .._kernels.mix import mix_backward, mix_forward


def unsupported(tensors: dict, options: dict) -> str | None:
    return pipeline.unsupported(tensors, options) or narrow(tensors["f"])


def forward(
    x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None,
    *, form: str, orientation: str, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    n = x.shape[-2]
    y = mix_forward(streams(x), rows(f), dense(h_post, -1, n), dense(h_res, -1, n, n), orientation)
    x_next = stage("x_next", shaped(y, x.shape))
    names = {"h_post": "h_post_next", "h_res": "h_res_next"}
    found = pipeline.forward(x_next, phi, alpha, bias, gamma, collapsed=True, names=names, **options)
    return x_next, *(found[name] for name in ("h_in", "h_post", "h_res", "inv_rms", "h_mix"))


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    n = tensors["x"].shape[-2]
    below = pipeline.backward(
        {**tensors, "x": tensors["x_next"]}, options, u=grads["h_in"],
        h_post=grads["h_post_next"], h_res=grads["h_res_next"], grad=grads["x_next"], output="dx_next",
    )  # fmt: skip
    above = mix_backward(
        streams(below.pop("x")), streams(tensors["x"]), rows(tensors["f"]), dense(tensors["h_post"], -1, n),
        dense(tensors["h_res"], -1, n, n), options["orientation"], needs_dx="x" in needs,
    )  # fmt: skip
    names = {"f": "df", "h_post": "dh_post", "h_res": "dh_res", "x": "dx_post"}
    above = {name: stage(names[name], shaped(grad, tensors[name].shape)) for name, grad in above.items()}
    return above | below
