"""The kernels strung together, for `coefficients`, `pre`, `head`, `connect` and `boundary` alike.

forward    project -> coefficients -> collapse
backward   dots -> coefficients backward -> dx and the partial sums of dphi in one pass -> ordered second stage
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...core.tracing import stage, tracing
from .coefficients import coefficients_backward, coefficients_forward
from .collapse import collapse, collapse_dots
from .finish import finish
from .gradient import stream_gradient
from .launch import dense, narrow, narrow_n, rows, shaped, streams
from .planes import from_planes, to_planes
from .project import project
from .psi import partial_psi


def unsupported(tensors: dict, options: dict) -> str | None:
    if options.get("form", "deepseek") != "deepseek":
        return f"form={options['form']!r} has a reference only; form='deepseek' runs here"
    return narrow_n(tensors["x"].shape[-2]) or narrow(tensors["x"], tensors["phi"])


def of_tokens(x: Tensor, value: Tensor) -> Tensor:
    """A record of every token [T, ...] with x's leading dimensions."""
    return shaped(value, (*x.shape[:-2], *value.shape[1:]))


def staged(name: str, x: Tensor, value: Tensor) -> Tensor:
    """A stage has x's leading dimensions, as in the reference; here tokens stand in one row."""
    return shaped(stage(name, of_tokens(x, value)), value.shape)


def forward(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, *, collapsed: bool, output: str = "h_in",
    names: dict[str, str] | None = None, **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Every result, for x [..., n, D].

    `names` renames stages (`boundary` calls the next connection's h_post `h_post_next`).
    """
    called, flat = names or {}, streams(x)
    n, K = flat.shape[1], flat.shape[1] * flat.shape[2]
    part = project(flat, phi.contiguous(), None if gamma is None else gamma.reshape(-1).contiguous())
    traced = tracing("h_res_logits") or tracing("h_pre")
    found = coefficients_forward(part, alpha.contiguous(), bias.contiguous(), n, K, logits=traced, **options)
    if traced and "h_res" in found:
        staged("h_res_logits", x, found["logits"][:, 2 * n :].unflatten(-1, (n, n)))
    balanced = ("h_res",) if options.get("sinkhorn", True) else ()
    for name in ("inv_rms", "h_mix", "h_pre", "h_post", *balanced):
        if name in found:
            found[name] = staged(called.get(name, name), x, found[name])
    if collapsed:
        found[output] = staged(output, x, collapse(flat, found["h_pre"]))
    return {name: of_tokens(x, value) for name, value in found.items()}


def coefficient_gradients(
    tensors: dict, options: dict, dh_pre: Tensor | None, dh_post: Tensor | None, dh_res: Tensor | None
) -> dict[str, Tensor]:
    """Per token dm (as planes), kappa, h_pre, and the partial sums for dalpha and dbias."""
    x, M = tensors["x"], tensors["phi"].shape[0]
    n, D = x.shape[-2:]
    flat = lambda g, *shape: None if g is None else dense(g, -1, *shape)  # noqa: E731
    names = ("pre_eps", "post_mult", "iterations", "sinkhorn_eps", "sinkhorn")
    found = coefficients_backward(
        flat(dh_pre, n), flat(dh_post, n), flat(dh_res, n, n), dense(tensors["h_mix"], -1, M),
        dense(tensors["inv_rms"], -1), tensors["alpha"].contiguous(), tensors["bias"].contiguous(), n, n * D,
        dlogits=tracing("dlogits"),
        **{name: options[name] for name in names if name in options},
    )  # fmt: skip
    if "dlogits" in found:
        staged("dlogits", x, found["dlogits"])
    if tracing("dm"):
        found["dm"] = to_planes(staged("dm", x, from_planes(found["dm"], M)), found["dm"])
    return found


def backward(
    tensors: dict, options: dict, *, u: Tensor | None = None, h_pre: Tensor | None = None, h_post: Tensor | None = None,
    h_res: Tensor | None = None, grad: Tensor | None = None, mixing: Tensor | None = None, orientation: str = "in_out",
    output: str = "dx",
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients of x, phi, alpha, bias and gamma.

    u is the gradient of h_in; h_pre, h_post, h_res those of the coefficients; `grad` is added into dx, through
    `mixing` = h_res where given.
    """
    x, u = streams(tensors["x"]), None if u is None else rows(u)
    T, n, _ = x.shape
    phi, gamma = tensors["phi"].contiguous(), tensors.get("gamma")
    dh_pre = staged("dh_pre", tensors["x"], collapse_dots(x, u)) if u is not None else h_pre
    found = coefficient_gradients(tensors, options, dh_pre, h_post, h_res)
    dx = stream_gradient(
        x, found["dm"], found["kappa"], phi, None if gamma is None else gamma.reshape(-1).contiguous(),
        u=u, h_pre=found["h_pre"], grad=None if grad is None else streams(grad),
        h_res=None if mixing is None else dense(mixing, T, n, n), orientation=orientation,
    )  # fmt: skip
    return {"x": stage(output, shaped(dx, tensors["x"].shape)), **parameter_gradients(tensors, x, found)}


def parameter_gradients(tensors: dict, x: Tensor, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """dphi and dgamma from Psi = dm^T X, dalpha and dbias from their partial sums; x is [T, n, D]."""
    phi, alpha, bias = (tensors[name].contiguous() for name in ("phi", "alpha", "bias"))
    gamma = tensors.get("gamma")
    psi = partial_psi(x, found["dm"], phi.shape[0])
    done = finish(psi, found["sums"], phi, None if gamma is None else gamma.contiguous(), alpha, bias, x.shape[1])
    return {name.removeprefix("d"): stage(name, grad) for name, grad in done.items()}
