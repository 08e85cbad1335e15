"""The kernels strung together, for `coefficients`, `pre`, `head`, `connect` and `boundary` alike.

    forward    project -> coefficients -> collapse
    backward   dots -> coefficients backward -> dx and the partial sums of dphi in one pass -> ordered second stage
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...assay.stage import stage, tracing
from .coefficients import coefficients_backward, coefficients_forward
from .collapse import collapse, collapse_dots
from .finish import finish_phi
from .gradient import stream_gradient
from .launch import dense, narrow, narrow_n, streams
from .project import project
from .psi import partial_psi


def unsupported(tensors: dict, options: dict) -> str | None:
    if options.get("form", "deepseek") != "deepseek":
        return f"form={options['form']!r} has a reference only; form='deepseek' runs here"
    return narrow_n(tensors["x"].shape[-2]) or narrow(tensors["x"], tensors["phi"])


def shaped(x: Tensor, found: dict[str, Tensor], names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Results over tokens [T, ...] with x's leading dimensions."""
    batch = x.shape[:-2]
    return tuple(found[name].reshape((*batch, *found[name].shape[1:])) for name in names)


def forward(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, *, collapsed: bool, output: str = "h_in",
    names: dict[str, str] | None = None, **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Every result over tokens, for x [T, n, D].

    `names` renames stages (`boundary` calls the next connection's h_post `h_post_next`).
    """
    called = names or {}
    n, K = x.shape[1], x.shape[1] * x.shape[2]
    gamma = None if gamma is None else gamma.reshape(-1).contiguous()
    part = project(x, phi.contiguous(), gamma)
    traced = tracing("h_res_logits") or tracing("h_pre")
    found = coefficients_forward(part, alpha.contiguous(), bias.contiguous(), n, K, logits=traced, **options)
    for name in ("inv_rms", "h_mix", "h_pre", "h_post"):
        if name in found:
            found[name] = stage(called.get(name, name), found[name])
    if traced and "h_res" in found:
        stage("h_res_logits", found["logits"][:, 2 * n :].unflatten(-1, (n, n)))
    if "h_res" in found and options.get("sinkhorn", True):
        found["h_res"] = stage(called.get("h_res", "h_res"), found["h_res"])
    if collapsed:
        found[output] = stage(output, collapse(x, found["h_pre"]))
    return found


def coefficient_gradients(
    tensors: dict, options: dict, x: Tensor, dh_pre: Tensor | None, dh_post: Tensor | None, dh_res: Tensor | None
) -> dict[str, Tensor]:
    """Per token dm, kappa, h_pre; over tokens dalpha, dbias; x is [T, n, D]."""
    _, n, D = x.shape
    flat = lambda g, *shape: None if g is None else dense(g, -1, *shape)  # noqa: E731
    names = ("pre_eps", "post_mult", "iterations", "sinkhorn_eps", "sinkhorn")
    given = {name: options[name] for name in names if name in options}
    found = coefficients_backward(
        flat(dh_pre, n), flat(dh_post, n), flat(dh_res, n, n), dense(tensors["h_mix"], x.shape[0], tensors["phi"].shape[0]),
        dense(tensors["inv_rms"], x.shape[0]), tensors["alpha"].contiguous(), tensors["bias"].contiguous(), n, n * D,
        dlogits=tracing("dlogits"), **given,
    )  # fmt: skip
    for name in ("dlogits", "dm", "dalpha", "dbias"):
        if name in found:
            found[name] = stage(name, found[name])
    return found


def backward(
    tensors: dict, options: dict, *, u: Tensor | None = None, h_pre: Tensor | None = None, h_post: Tensor | None = None,
    h_res: Tensor | None = None, grad: Tensor | None = None, mixing: Tensor | None = None, orientation: str = "in_out",
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients of x, phi, alpha, bias and gamma.

    u [T, D] is the gradient of h_in; h_pre, h_post, h_res those of the coefficients; `grad`, the gradient of post's result,
    enters dx through `mixing` = h_res.
    """
    x = streams(tensors["x"])
    T, n, _ = x.shape
    phi, gamma = tensors["phi"].contiguous(), tensors.get("gamma")
    flat_gamma = None if gamma is None else gamma.reshape(-1).contiguous()
    dh_pre = stage("dh_pre", collapse_dots(x, u)) if u is not None else h_pre
    found = coefficient_gradients(tensors, options, x, dh_pre, h_post, h_res)
    dx = stream_gradient(
        x, found["dm"], found["kappa"], phi, flat_gamma, u=u, h_pre=found["h_pre"],
        grad=None if grad is None else streams(grad), h_res=None if mixing is None else dense(mixing, T, n, n),
        orientation=orientation,
    )  # fmt: skip
    return {"x": stage("dx", dx.reshape(tensors["x"].shape)), **parameter_gradients(tensors, x, found)}


def parameter_gradients(tensors: dict, x: Tensor, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """dphi and dgamma from Psi = dm^T X, beside dalpha and dbias; x is [T, n, D]."""
    phi, gamma = tensors["phi"].contiguous(), tensors.get("gamma")
    dphi, dgamma = finish_phi(partial_psi(x, found["dm"]), phi, None if gamma is None else gamma.contiguous())
    out = {"phi": stage("dphi", dphi), "alpha": found["dalpha"], "bias": found["dbias"]}
    if dgamma is not None:
        out["gamma"] = stage("dgamma", dgamma)
    return out
