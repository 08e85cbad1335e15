"""Composite operators as textbook formulas of simpler ones, for the error analysis and for the legal orders.

A reduction inside one (of a variance, of a norm) thereby becomes a sum that both modes handle.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .rule_context import Dim


def _dims(x: Tensor, dim: Dim) -> list[int]:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(x.dim()))
    return [dim] if isinstance(dim, int) else list(dim)


def var_mean(
    x: Tensor, dim: Dim = None, *, correction: float | None = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """sum((x - mean)^2) / (n - correction), mean"""
    dims = _dims(x, dim)
    n = math.prod(x.shape[d] for d in dims)
    mean = x.mean(dims, keepdim=True)
    d = x - mean
    variance = (d * d).sum(dims, keepdim=keepdim) / (n - (1 if correction is None else correction))
    return variance, mean if keepdim else mean.squeeze(dims)


def var(x: Tensor, dim: Dim = None, *args: object, correction: float | None = 1, keepdim: bool = False) -> Tensor:
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def std(x: Tensor, dim: Dim = None, *args: object, correction: float | None = 1, keepdim: bool = False) -> Tensor:
    return var(x, dim, correction=correction, keepdim=keepdim).sqrt()


def native_layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) rsqrt(var + eps) weight + bias"""
    dims = list(range(x.dim() - len(shape), x.dim()))
    variance, mean = var_mean(x, dims, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    y = (x - mean) * rstd
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), mean, rstd


def native_group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, batch: int, channels: int, size: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """layer norm of each group of channels"""
    flat = x.reshape(batch, groups, -1)
    variance, mean = var_mean(flat, [2], correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    y = ((flat - mean) * rstd).reshape(x.shape)
    shape = (1, channels, *(1,) * (x.dim() - 2))
    y = y if weight is None else y * weight.reshape(shape)
    return (y if bias is None else y + bias.reshape(shape)), mean.reshape(batch, groups), rstd.reshape(batch, groups)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x/2 (1 + erf(x / sqrt 2)), or its tanh approximation"""
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def gelu_backward(grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    """(Phi(x) + x phi(x)) g, or the derivative of the tanh approximation"""
    if approximate == "tanh":
        t = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
        inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
        return grad * (0.5 * (1 + t) + 0.5 * x * ((1 - t * t) * inner))
    density = torch.exp(-0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))
    return grad * (0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * density)


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """log(1 + exp(beta x)) / beta, linear above the threshold"""
    return torch.where(x * beta > threshold, x, torch.log1p(torch.exp(x * beta)) / beta)


def elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))


def glu(x: Tensor, dim: int = -1) -> Tensor:
    """a sigmoid(b), the halves of x"""
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)


def log_sigmoid(x: Tensor) -> Tensor:
    """min(x, 0) - log(1 + exp(-|x|))"""
    return torch.clamp(x, max=0) - torch.log1p(torch.exp(-x.abs()))


def bce_with_logits(
    x: Tensor,
    t: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
    *,
    other: bool = True,
) -> Tensor:
    """(1 - t) x + w (log(1 + exp(-|x|)) + max(-x, 0)), w = (p - 1) t + 1; without p also max(x, 0) - t x + log(...)
    and log(1 + exp(x)) - t x.

    A golden that calls torch's operator cannot choose between the three formulas, so it gets the widest bound.
    """
    log = torch.log1p(torch.exp(-x.abs()))
    scale = 1 if pos_weight is None else (pos_weight - 1) * t + 1
    loss = (1 - t) * x + scale * (log + torch.clamp(-x, min=0))
    if pos_weight is None:
        textbook = torch.clamp(x, min=0) - x * t + log
        loss = torch.maximum(torch.maximum(loss, textbook), softplus(x) - x * t) if other else textbook
    loss = loss if weight is None else loss * weight
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


def hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """0, g (x / 3 + 1 / 2) or g; written as a product even where the factor is 1, because g / 6 * 6 rounds"""
    return torch.where(x <= -3, torch.zeros_like(grad), grad * torch.clamp(x / 3 + 0.5, max=1.0))


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    return torch.where(x > 0, x, x * negative_slope)


def hardtanh(x: Tensor, low: float = -1, high: float = 1) -> Tensor:
    return torch.clamp(x, low, high)


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """max(a, b) + log(1 + exp(-|a - b|)), or a + softplus(b - a): the wider bound of the two"""
    log = torch.log1p(torch.exp(-(a - b).abs()))
    return torch.maximum(torch.maximum(a, b) + log, a + (torch.clamp(b - a, min=0) + log))


def tan(x: Tensor) -> Tensor:
    return torch.sin(x) / torch.cos(x)


def cosh(x: Tensor) -> Tensor:
    return (torch.exp(x) + torch.exp(-x)) * 0.5


def mish(x: Tensor) -> Tensor:
    """x tanh(log(1 + exp(x)))"""
    return x * torch.tanh(softplus(x))


def celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return torch.where(x > 0, x, torch.expm1(x / alpha) * alpha)


def threshold(x: Tensor, low: float, value: float) -> Tensor:
    return torch.where(x <= low, torch.full_like(x, value), x)


def xlogy(x: Tensor, y: Tensor) -> Tensor:
    """x log(y), 0 where x is 0"""
    return torch.where(x == 0, torch.zeros_like(x), x * torch.log(torch.where(x == 0, torch.ones_like(y), y)))


def logit(x: Tensor, eps: float | None = None) -> Tensor:
    """log(x / (1 - x))"""
    x = x if eps is None else torch.clamp(x, eps, 1 - eps)
    return torch.log(x / (1 - x))


def huber_loss(x: Tensor, y: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    """d^2 / 2 up to |d| = delta, linear beyond"""
    d = (x - y).abs()
    loss = torch.where(d <= delta, 0.5 * d * d, delta * (d - 0.5 * delta))
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


def linalg_cross(a: Tensor, b: Tensor, *, dim: int = -1) -> Tensor:
    def turned(x: Tensor, k: int) -> Tensor:
        return x.roll(-k, dim)

    return turned(a, 1) * turned(b, 2) - turned(a, 2) * turned(b, 1)


def addbmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return c * beta + (a @ b).sum(0) * alpha


def norm(
    x: Tensor, p: float | None = 2, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    return torch.linalg.vector_norm(x, 2 if p is None else p, dim, keepdim)


def addr(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return c * beta + torch.outer(a, b) * alpha


def trace(x: Tensor) -> Tensor:
    return x.diagonal().sum()


def _for_heads(q: Tensor, k: Tensor) -> Tensor:
    """Keys or values of grouped-query attention, repeated for every head of their group."""
    return k if k.shape[-3] == q.shape[-3] else k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)


def _of_heads(grad: Tensor, k: Tensor) -> Tensor:
    return grad if grad.shape == k.shape else grad.unflatten(-3, (k.shape[-3], -1)).sum(-3)


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, scale: float | None) -> tuple[Tensor, float]:
    """q k^T scale + mask"""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = (q @ k.transpose(-1, -2)) * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return (s if mask is None else s + mask), scale


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale + mask) v, and the logarithm of the softmax's sum"""
    k, v = _for_heads(q, k), _for_heads(q, v)
    s, _ = _scores(q, k, is_causal, attn_mask, scale)
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def attention_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """ds = p (g v^T - sum(g out)); dq = ds k scale, dk = ds^T q scale, dv = p^T g"""
    few, k, v = k, _for_heads(q, k), _for_heads(q, v)
    s, scale = _scores(q, k, is_causal, attn_mask, scale)
    p = torch.exp(s - lse.unsqueeze(-1))
    ds = p * (g @ v.transpose(-1, -2) - (g * out).sum(-1, keepdim=True))
    dk, dv = ds.transpose(-1, -2) @ q * scale, p.transpose(-1, -2) @ g
    return ds @ k * scale, _of_heads(dk, few), _of_heads(dv, few)


def max_pool2d_backward(
    grad: Tensor, x: Tensor, kernel_size: object, stride: object, padding: object, dilation: object, ceil_mode: bool,
    indices: Tensor,
) -> Tensor:  # fmt: skip
    """g at the index of each maximum, summed where windows overlap; torch 2.11 never decomposes it, later often"""
    flat = torch.zeros_like(x, memory_format=torch.contiguous_format).flatten(-2)
    return flat.scatter_add(-1, indices.flatten(-2), grad.flatten(-2)).view(x.shape)


# only for the legal orders: the error analysis has its own rules for these operators


def softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """exp(x - max) / sum(exp(x - max))"""
    if x.dim() == 0 or not x.numel():
        return torch.ones_like(x)
    p = torch.exp(x - x.amax(dim, keepdim=True))
    return p / p.sum(dim, keepdim=True)


def log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """x - max - log(sum(exp(x - max)))"""
    if x.dim() == 0 or not x.numel():
        return torch.zeros_like(x)
    d = x - x.amax(dim, keepdim=True)
    return d - torch.log(torch.exp(d).sum(dim, keepdim=True))


def softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """y (g - sum(g y))"""
    return y * (grad - ((grad * y).sum(dim, keepdim=True) if y.dim() else grad * y))


def log_softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """g - exp(y) sum(g)"""
    return grad - torch.exp(y) * (grad.sum(dim, keepdim=True) if y.dim() else grad)


def logsumexp(x: Tensor, dim: Dim, keepdim: bool = False) -> Tensor:
    """max + log(sum(exp(x - max))); Inf and -Inf are returned unchanged"""
    dims = _dims(x, dim)
    if not x.numel():
        return x.sum(dims, keepdim=keepdim).log()
    peak = x.amax(dims, keepdim=True)
    peak = torch.where(torch.isfinite(peak), peak, torch.zeros_like(peak))
    out = torch.log(torch.exp(x - peak).sum(dims, keepdim=True)) + peak
    return out if keepdim else out.squeeze(dims)


def vector_norm(
    x: Tensor, ord: float = 2, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """sqrt(sum(x^2)), sum|x| or max|x|"""
    dims = _dims(x, dim)
    if ord == 2:
        return (x * x).sum(dims, keepdim=keepdim).sqrt()
    if ord == 1:
        return x.abs().sum(dims, keepdim=keepdim)
    if ord in (math.inf, -math.inf):
        return (x.abs().amax if ord > 0 else x.abs().amin)(dims, keepdim=keepdim)
    if ord == 0:
        return (x != 0).to(x.dtype).sum(dims, keepdim=keepdim)
    return (x.abs() ** ord).sum(dims, keepdim=keepdim) ** (1 / ord)


def solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """y_i = (b_i - sum_j a_ij y_j) / a_ii, row by row"""
    if not left:
        return solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b, n = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:]), b.shape[-2]
    known = torch.zeros_like(b[..., :0, :])
    for i in reversed(range(n)) if upper else range(n):
        others = slice(i + 1, n) if upper else slice(0, i)
        row = b[..., i : i + 1, :] - a[..., i : i + 1, others] @ known
        row = row if unitriangular else row / a[..., i : i + 1, i : i + 1]
        known = torch.cat([row, known] if upper else [known, row], -2)
    return known


Composition = Callable[..., Tensor | tuple[Tensor, ...]]
COMPOSED: dict[str, Composition] = {
    "var": var, "var_mean": var_mean, "std": std, "native_layer_norm": native_layer_norm,
    "native_group_norm": native_group_norm, "gelu": gelu, "gelu_backward": gelu_backward,
    "softplus": softplus, "elu": elu, "leaky_relu": leaky_relu,
    "glu": glu, "log_sigmoid": log_sigmoid, "binary_cross_entropy_with_logits": bce_with_logits,
    "hardswish_backward": hardswish_backward,
    "mish": mish, "celu": celu, "threshold": threshold, "xlogy": xlogy, "logit": logit, "huber_loss": huber_loss,
    "linalg_cross": linalg_cross, "addbmm": addbmm, "norm": norm,
    "hardtanh": hardtanh, "logaddexp": logaddexp, "tan": tan, "cosh": cosh, "addr": addr, "trace": trace,
    "max_pool2d_with_indices_backward": max_pool2d_backward,
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
}  # fmt: skip

REDUCTIONS: dict[str, Composition] = {
    "linalg_solve_triangular": solve_triangular,
    "_softmax": softmax, "_log_softmax": log_softmax, "_softmax_backward_data": softmax_backward,
    "_log_softmax_backward_data": log_softmax_backward, "logsumexp": logsumexp, "linalg_vector_norm": vector_norm,
    "binary_cross_entropy_with_logits": functools.partial(bce_with_logits, other=False),
}  # fmt: skip
