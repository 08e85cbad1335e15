"""mhc.lagged_boundary on a GPU: one pass over the streams forward; the backward is mhc.boundary's with another h_pre.

Elements moved per token at n = 4: forward 10D; backward 5D (dots) + 13D (x_next) + 4D (dphi) + 14D (post).
"""

from __future__ import annotations

from torch import Tensor

from ...core.tracing import stage
from .._kernels import pipeline
from .._kernels.collapse import collapse_dots
from .._kernels.lagged import lagged_forward
from .._kernels.launch import dense, rows, shaped, streams, unsupported_dtype
from .._kernels.mix import mix_backward
from .._kernels.stream_gradient import stream_gradient


def unsupported(tensors: dict, options: dict) -> str | None:
    return pipeline.unsupported(tensors, options) or unsupported_dtype(tensors["f"])


def forward(
    x: Tensor, f: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor,
    gamma: Tensor | None, *, form: str, orientation: str, rms_form: str, **options: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    n = x.shape[-2]
    y, h_in, part = lagged_forward(
        streams(x), rows(f), dense(h_pre, -1, n), dense(h_post, -1, n), dense(h_res, -1, n, n), phi.contiguous(),
        None if gamma is None else gamma.reshape(-1).contiguous(), orientation,
    )  # fmt: skip
    x_next = stage("x_next", shaped(y, x.shape))
    h_in = stage("h_in", shaped(h_in, f.shape))
    names = {name: f"{name}_next" for name in ("h_pre", "h_post", "h_res")}
    results = pipeline.coefficients(x, part, alpha, bias, names, **options)
    return x_next, h_in, *(results[name] for name in ("h_pre", "h_post", "h_res", "inv_rms", "h_mix"))


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    x_next = tensors["x_next"]
    n, flat, after = x_next.shape[-2], streams(x_next), {**tensors, "x": x_next}
    u = None if grads["h_in"] is None else rows(grads["h_in"])
    h_pre, gamma = dense(tensors["h_pre"], -1, n), tensors["gamma"]
    dots = h_pre.new_zeros(h_pre.shape) if u is None else collapse_dots(flat, u)
    of_next = (grads[f"{name}_next"] for name in ("h_pre", "h_post", "h_res"))
    partials = pipeline.coefficient_gradients(after, options, *of_next)
    dx_next = stream_gradient(
        flat, partials["dm"], partials["kappa"], tensors["phi"].contiguous(),
        None if gamma is None else gamma.reshape(-1).contiguous(),
        u=u, h_pre=h_pre, grad=None if grads["x_next"] is None else streams(grads["x_next"]),
    )  # fmt: skip
    dx_next = stage("dx_next", shaped(dx_next, x_next.shape))
    above = mix_backward(
        streams(dx_next), streams(tensors["x"]), rows(tensors["f"]), dense(tensors["h_post"], -1, n),
        dense(tensors["h_res"], -1, n, n), options["orientation"], needs_dx="x" in needs,
    )  # fmt: skip
    names = {"f": "df", "h_post": "dh_post", "h_res": "dh_res", "x": "dx_post", "h_pre": "dh_pre_before"}
    above["h_pre"] = dots
    above = {name: stage(names[name], shaped(grad, tensors[name].shape)) for name, grad in above.items()}
    return above | pipeline.parameter_gradients(after, flat, partials)
