"""The sequence of kernels behind `coefficients`, `pre`, `head`, `connect_backward` and `boundary`.

forward    projection -> coefficients -> collapse; for few tokens chunks -> all that needs their sum (few_tokens.py)
backward   dots -> coefficients' backward -> dx, partial sums of dphi -> ordered sums
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.tracing import stage, tracing
from .bfloat16_planes import from_planes, to_planes
from .coefficients import coefficients_backward, coefficients_forward
from .collapse import collapse, collapse_dots
from .few_tokens import are_few, mixed_chunks
from .few_tokens import finish as finish_tokens
from .launch import dense, rows, shaped, streams, unsupported_dtype, unsupported_n
from .ordered_sums import finish, partial_psi
from .projection import project
from .stream_gradient import stream_gradient


def unsupported(tensors: dict, options: dict) -> str | None:
    """The reason why these kernels cannot run on these inputs, or None."""
    if options.get("form", "deepseek") != "deepseek":
        return f"form={options['form']!r} runs on the reference only; this backend takes form='deepseek'"
    if options.get("rms_form", "inside") != "inside":
        return "rms_form='outside' runs on the reference only; this backend takes rms_form='inside'"
    return unsupported_n(tensors["x"].shape[-2]) or unsupported_dtype(tensors["x"], tensors["phi"])


def in_batch_shape(x: Tensor, value: Tensor) -> Tensor:
    """A value per token, [T, ...], in the leading dimensions of x."""
    return shaped(value, (*x.shape[:-2], *value.shape[1:]))


def mark_stage(name: str, x: Tensor, value: Tensor) -> Tensor:
    """Marks value [T, ...] as a stage, in the leading dimensions of x as in the reference; returns it as [T, ...]."""
    return shaped(stage(name, in_batch_shape(x, value)), value.shape)


def forward(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, *, collapsed: bool, output: str = "h_in",
    names: dict[str, str] | None = None, rms_form: str = "inside", **options: object,
) -> dict[str, Tensor]:  # fmt: skip
    """The coefficients for x [..., n, D] by name; with `collapsed` also the weighted sum of the streams, `output`.

    names   stage -> another name for it (`boundary` calls the next connection's h_post `h_post_next`)
    """
    flat, phi = streams(x), phi.contiguous()
    gamma = None if gamma is None else gamma.reshape(-1).contiguous()
    if are_few(flat):
        return few_tokens(x, *mixed_chunks(flat, phi, gamma), alpha, bias, names or {}, collapsed, output, **options)
    results = coefficients(x, project(flat, phi, gamma), alpha, bias, names or {}, **options)
    if collapsed:
        h_pre = results["h_pre"].reshape(flat.shape[:2])
        results[output] = in_batch_shape(x, mark_stage(output, x, collapse(flat, h_pre)))
    return results


def few_tokens(
    x: Tensor, flat: Tensor, partial_sums: Tensor, alpha: Tensor, bias: Tensor, names: dict[str, str], collapsed: bool,
    output: str, **options: object,
) -> dict[str, Tensor]:  # fmt: skip
    """The coefficients by name and `output`, in the leading dimensions of x, from the chunks' partial sums."""
    alpha, bias, wanted = alpha.contiguous(), bias.contiguous(), output if collapsed else None
    if not tracing():
        return finish_tokens(partial_sums, flat, alpha, bias, output=wanted, batch=x.shape[:-2], **options)
    results = finish_tokens(partial_sums, flat, alpha, bias, output=wanted, logits=True, **options)
    h_in, h_pre = results.pop(output, None), results["h_pre"]
    results = marked(x, results, names, **options)
    if collapsed:
        replaced = results["h_pre"].reshape(flat.shape[:2])
        h_in = h_in if torch.equal(replaced, h_pre) else collapse(flat, replaced)
        results[output] = in_batch_shape(x, mark_stage(output, x, h_in))
    return results


def coefficients(
    x: Tensor, partial_sums: Tensor, alpha: Tensor, bias: Tensor, names: dict[str, str], **options: object
) -> dict[str, Tensor]:
    """The coefficients by name, in the leading dimensions of x, from the partial sums of its projection."""
    n, K = x.shape[-2], x.shape[-2] * x.shape[-1]
    traced = tracing("h_res_logits") or tracing(names.get("h_pre", "h_pre"))
    results = coefficients_forward(partial_sums, alpha.contiguous(), bias.contiguous(), n, K, logits=traced, **options)
    return marked(x, results, names, **options)


def marked(x: Tensor, results: dict[str, Tensor], names: dict[str, str], **options: object) -> dict[str, Tensor]:
    """The coefficients by name in the leading dimensions of x, each marked as a stage."""
    n = x.shape[-2]
    if "logits" in results and "h_res" in results:
        mark_stage("h_res_logits", x, results["logits"][:, 2 * n :].unflatten(-1, (n, n)))
    balanced = ("h_res",) if options.get("sinkhorn", True) else ()
    for name in ("inv_rms", "h_mix", "h_pre", "h_post", *balanced):
        if name in results:
            results[name] = mark_stage(names.get(name, name), x, results[name])
    return {name: in_batch_shape(x, value) for name, value in results.items()}


def coefficient_gradients(
    tensors: dict, options: dict, dh_pre: Tensor | None, dh_post: Tensor | None, dh_res: Tensor | None
) -> dict[str, Tensor]:
    """dm (as planes), kappa and h_pre for each token; sums: partial sums for dalpha and dbias."""
    x, M = tensors["x"], tensors["phi"].shape[0]
    n, D = x.shape[-2:]
    flat = lambda g, *shape: None if g is None else dense(g, -1, *shape)  # noqa: E731
    names = ("pre_eps", "post_mult", "iterations", "sinkhorn_eps", "sinkhorn")
    results = coefficients_backward(
        flat(dh_pre, n), flat(dh_post, n), flat(dh_res, n, n), dense(tensors["h_mix"], -1, M),
        dense(tensors["inv_rms"], -1), tensors["alpha"].contiguous(), tensors["bias"].contiguous(), n, n * D,
        dlogits=tracing("dlogits"),
        **{name: options[name] for name in names if name in options},
    )  # fmt: skip
    if "dlogits" in results:
        mark_stage("dlogits", x, results["dlogits"])
    if tracing("dm"):
        results["dm"] = to_planes(mark_stage("dm", x, from_planes(results["dm"], M)), results["dm"])
    return results


def backward(
    tensors: dict, options: dict, *, u: Tensor | None = None, h_pre: Tensor | None = None, h_post: Tensor | None = None,
    h_res: Tensor | None = None, grad: Tensor | None = None, mixing: Tensor | None = None, orientation: str = "in_out",
    output: str = "dx",
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients of x, phi, alpha, bias and gamma by input name.

    u is the gradient of h_in; h_pre, h_post and h_res are the gradients of the coefficients. `grad` is added to dx.
    If `mixing` (h_res) is given, `grad` is mixed by it first.
    """
    x, u = streams(tensors["x"]), None if u is None else rows(u)
    T, n, _ = x.shape
    phi, gamma = tensors["phi"].contiguous(), tensors.get("gamma")
    dh_pre = mark_stage("dh_pre", tensors["x"], collapse_dots(x, u)) if u is not None else h_pre
    partials = coefficient_gradients(tensors, options, dh_pre, h_post, h_res)
    dx = stream_gradient(
        x, partials["dm"], partials["kappa"], phi, None if gamma is None else gamma.reshape(-1).contiguous(),
        u=u, h_pre=partials["h_pre"], grad=None if grad is None else streams(grad),
        h_res=None if mixing is None else dense(mixing, T, n, n), orientation=orientation,
    )  # fmt: skip
    return {"x": stage(output, shaped(dx, tensors["x"].shape)), **parameter_gradients(tensors, x, partials)}


def parameter_gradients(tensors: dict, x: Tensor, partials: dict[str, Tensor]) -> dict[str, Tensor]:
    """dphi and dgamma from Psi = dm^T X, dalpha and dbias from their partial sums; x is [T, n, D]."""
    phi, alpha, bias = (tensors[name].contiguous() for name in ("phi", "alpha", "bias"))
    gamma = tensors.get("gamma")
    psi = partial_psi(x, partials["dm"], phi.shape[0])
    gradients = finish(
        psi, partials["sums"], phi, None if gamma is None else gamma.contiguous(), alpha, bias, x.shape[1]
    )
    return {name.removeprefix("d"): stage(name, grad) for name, grad in gradients.items()}
