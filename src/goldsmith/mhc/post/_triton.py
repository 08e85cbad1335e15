"""mhc.post on a GPU: one program per token, bandwidth-bound; the kernels are in _kernels/mix.py."""

from __future__ import annotations

from torch import Tensor

from ...core.tracing import stage
from .._kernels.launch import dense, rows, shaped, streams, unsupported_dtype
from .._kernels.mix import mix_backward, mix_forward

LAUNCHES_ONLY = True


def unsupported(tensors: dict, options: dict) -> str | None:
    return unsupported_dtype(tensors["x"], tensors["f"])


def forward(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, *, orientation: str) -> tuple[Tensor]:
    n = x.shape[-2]
    y = mix_forward(streams(x), rows(f), dense(h_post, -1, n), dense(h_res, -1, n, n), orientation)
    return (stage("x_next", shaped(y, x.shape)),)


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    x, f, h_post, h_res = (tensors[name] for name in ("x", "f", "h_post", "h_res"))
    n = x.shape[-2]
    gradients = mix_backward(
        streams(grads["x_next"]), streams(x), rows(f), dense(h_post, -1, n), dense(h_res, -1, n, n),
        options["orientation"], needs_dx="x" in needs,
    )  # fmt: skip
    names = {"f": "df", "h_post": "dh_post", "h_res": "dh_res", "x": "dx_post"}
    return {name: stage(names[name], shaped(grad, tensors[name].shape)) for name, grad in gradients.items()}
