"""Error bounds of softmax, log-softmax, logsumexp and the softmax's backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from .elementwise import exact, scaled, total
from .rule_context import Error, Rule, RuleContext
from .sums import element_count


def _shifted(context: RuleContext, v: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """(max, x - max, relative rounding error of exp(x - max)), the last (3 |x - max| + 4) u: subtraction and exp."""
    peak = v.amax(dim, keepdim=True)
    d = torch.where(torch.isfinite(v), v - peak, 0.0)
    return peak, d, (3 * d.abs() + 4) * context.u


def _softmax(context: RuleContext, y: Tensor, x: Tensor, dim: int, *rest: object) -> Error:
    v, e = context(x)
    if v.dim() == 0 or v.numel() == 0:
        return context.rounding(y)
    _, _, relative = _shifted(context, v, dim)
    relative = cast(Tensor, total(relative, e))
    spread = relative + (y * relative).sum(dim, keepdim=True) + (context.gamma(v.shape[dim]) + 4 * context.u)
    return torch.maximum(y * torch.expm1(spread.clamp(max=700.0)), cast(Tensor, context.rounding(y, 1)))


def _lse(context: RuleContext, v: Tensor, e: Error, y: Tensor, p: Tensor, dim: int) -> Tensor:
    """Error of log(sum(exp(x))): relative error of the sum, plus rounding of the logarithm and of the last addition."""
    peak, _, relative = _shifted(context, v, dim)
    inside = (p * total(relative, e)).sum(dim, keepdim=True) + context.gamma(
        v.shape[dim] if isinstance(dim, int) else 1
    )
    return torch.expm1(inside.clamp(max=700.0)) + 4 * context.u * (y - peak).abs() + context.u * (y.abs() + peak.abs())


def _log_softmax(context: RuleContext, y: Tensor, x: Tensor, dim: int, *_: object) -> Error:
    v, e = context(x)
    if v.dim() == 0 or v.numel() == 0:
        return context.rounding(y)
    lse = torch.logsumexp(v, dim, keepdim=True)
    shifted = torch.where(torch.isfinite(v), v, 0.0).abs()
    return total(e, _lse(context, v, e, lse, y.exp(), dim), context.u * shifted, context.rounding(y, 2))


def _logsumexp(context: RuleContext, y: Tensor, x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Error:
    v, e = context(x)
    dims = [dim] if isinstance(dim, int) else list(dim)
    if v.dim() == 0 or v.numel() == 0:
        return total(e, context.rounding(y, 4))
    full = torch.logsumexp(v, dims, keepdim=True)
    p = torch.where(torch.isfinite(v), torch.exp(v - full), 0.0)
    peak = v.amax(dims, keepdim=True)
    d = torch.where(torch.isfinite(v), v - peak, 0.0).abs()
    inside = (p * total((3 * d + 4) * context.u, e)).sum(dims, keepdim=True) + context.gamma(element_count(v, full))
    out = (
        torch.expm1(inside.clamp(max=700.0))
        + 4 * context.u * (full - peak).abs()
        + context.u * (full.abs() + peak.abs())
    )
    return out if keepdim else out.reshape(y.shape)


def _softmax_backward(context: RuleContext, y: Tensor, grad: Tensor, p: Tensor, dim: int, *_: object) -> Error:
    """Error of p (g - s), s = sum(g p). A kernel may also compute p g - p s, so both products are rounded.

    In attention g = dy v^T and y = p v, so s = sum(dy y). If y is read back in 16 bits, as in FlashAttention's
    backward, each term is off by u |y|, and s by at most u sum(p |dy| |v|^T).
    """
    (vg, eg), (vp, ep) = context(grad), context(p)
    if vg.dim() == 0 or vg.numel() == 0:
        return total(scaled(vg, ep), context.rounding(y))
    gp = (vg * vp).abs()
    s = (vg * vp).sum(dim, keepdim=True)
    e_gp = total(scaled(vg, ep), scaled(vp, eg), 0.0 if exact(eg) or exact(ep) else eg * ep)
    e_s = cast(Tensor, total(context.gamma(vg.shape[dim]) * total(gp, e_gp), e_gp)).sum(dim, keepdim=True)
    if context.read_back:
        e_s = e_s + context.read_back * (context.size_of(grad) * vp.abs()).sum(dim, keepdim=True)
    outer = vp.abs() * total(eg, e_s) + scaled((vg - s).abs() + e_s, ep)
    return outer + 3 * context.u * (gp + vp.abs() * s.abs())


RULES: dict[str, Rule] = {
    "_softmax": _softmax, "_log_softmax": _log_softmax, "logsumexp": _logsumexp,
    "_softmax_backward_data": _softmax_backward,
}  # fmt: skip
