"""Fused torch functions written out step by step as in a kernel, so that mistakes inside them can be searched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Optional = Tensor | None


class Opened(TorchFunctionMode):
    """While active, these functions run in smaller steps if their arguments have the usual form."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        smaller = _SMALLER.get(func)
        result = NotImplemented if smaller is None else smaller(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def _normalised(x: Tensor, axes: list[int], eps: float) -> Tensor:
    apart = x - x.mean(axes, keepdim=True)
    return apart * torch.rsqrt(apart.square().mean(axes, keepdim=True) + eps)


def _scaled(y: Tensor, weight: Optional, bias: Optional = None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Optional = None, bias: Optional = None, eps: float = 1e-5, *_: object
) -> Tensor:
    return _scaled(_normalised(x, list(range(x.dim() - len(shape), x.dim())), eps), weight, bias)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Optional = None, eps: float | None = None) -> Tensor:
    axes = list(range(x.dim() - len(shape), x.dim()))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _scaled(x * torch.rsqrt(x.square().mean(axes, keepdim=True) + eps), weight)


def _group_norm(
    x: Tensor, groups: int, weight: Optional = None, bias: Optional = None, eps: float = 1e-5, *_: object
) -> Tensor:
    if not x.numel():
        return NotImplemented
    y = _normalised(x.reshape(x.shape[0], groups, -1), [-1], eps).reshape(x.shape)
    weight, bias = (None if t is None else t.reshape(-1, *[1] * (x.dim() - 2)) for t in (weight, bias))
    return _scaled(y, weight, bias)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Optional = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if dropout_p or enable_gqa or attn_mask is not None and is_causal:
        return NotImplemented
    scores = (q @ k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ v


def _nll_loss(
    logp: Tensor, target: Tensor, weight: Optional = None, size_average: object = None, ignore_index: int = -100,
    reduce: object = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    if logp.dim() != 2 or weight is not None or size_average is not None or reduce is not None:
        return NotImplemented
    valid = target != ignore_index
    loss = torch.where(valid, -logp.gather(1, torch.where(valid, target, 0)[:, None])[:, 0], 0.0)
    return _reduced(loss, reduction, valid)


def _reduced(loss: Tensor, reduction: str, valid: Tensor) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() / valid.sum().to(loss.dtype) if reduction == "mean" else loss.sum()


def _cross_entropy(
    logits: Tensor, target: Tensor, weight: Optional = None, size_average: object = None, ignore_index: int = -100,
    reduce: object = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    if label_smoothing or target.is_floating_point() or logits.dim() != 2:
        return NotImplemented
    logp = logits.log_softmax(-1)
    return _nll_loss(logp, target, weight, size_average, ignore_index, reduce, reduction)


def _batch_norm(
    x: Tensor, mean: Optional, var: Optional, weight: Optional = None, bias: Optional = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    shape = [1, -1] + [1] * (x.dim() - 2)
    if training and mean is not None or x.dim() < 2:  # it would update the running statistics
        return NotImplemented
    if training:
        y = _normalised(x, [d for d in range(x.dim()) if d != 1], eps)
    elif mean is None or var is None:
        return NotImplemented
    else:
        y = (x - mean.reshape(shape)) * torch.rsqrt(var.reshape(shape) + eps)
    return _scaled(y, *(None if t is None else t.reshape(shape) for t in (weight, bias)))


def _cross(a: Tensor, b: Tensor, *, dim: int = -1, **more: object) -> Tensor:
    if more:
        return NotImplemented
    return a.roll(-1, dim) * b.roll(-2, dim) - a.roll(-2, dim) * b.roll(-1, dim)


def _product(a: Any, b: Any, **more: Any) -> Tensor:
    """A complex product by real and imaginary parts. Double negation leaves a minus that may be forgotten."""
    complex_ = isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_complex() and b.is_complex()
    if not complex_ or more:
        return NotImplemented
    (x, y), (u, v) = (torch.view_as_real(t.resolve_conj()).unbind(-1) for t in (a, b))
    y, v = y.neg().neg(), v.neg().neg()
    return torch.view_as_complex(torch.stack((x * u - y * v, x * v + y * u), -1))


_SMALLER: dict[object, Callable[..., object]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.scaled_dot_product_attention: _attention,
    F.nll_loss: _nll_loss,
    F.cross_entropy: _cross_entropy,
    torch.linalg.cross: _cross,
    torch.mul: _product,
    Tensor.mul: _product,
    Tensor.__mul__: _product,
}
