"""h = act(g, u) and its derivatives, in plain torch, from exp, tanh and erf only.

The last bit of torch's own sigmoid and gelu depends on the position of a number in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_ROOT_HALF, _ROOT_2_BY_PI, _CUBIC = math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715


def activate(activation: str, g: Tensor, u: Tensor, alpha: float, limit: float | None) -> Tensor:
    """h = act(g', u') with g' = min(g, limit), u' = clamp(u, -limit, limit)"""
    left, right = factors(activation, g, u, alpha, limit)
    return left * right


def factors(activation: str, g: Tensor, u: Tensor, alpha: float, limit: float | None) -> tuple[Tensor, Tensor]:
    """The two factors of h: the one of the gate, and the one of up."""
    g, u = _clamped(g, u, limit)
    if activation == "swiglu_oai":
        return g * _sigmoid(alpha * g), u + 1
    return _GATE[activation](g), u


def slopes(
    activation: str, g: Tensor, u: Tensor, alpha: float, limit: float | None
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Functions dh -> dg and dh -> du. Zero beyond the limit for any dh; passed on at equality, like torch.clamp."""
    within_g = None if limit is None else g <= limit
    within_u = None if limit is None else (u >= -limit) & (u <= limit)
    g, u = _clamped(g, u, limit)
    if activation == "swiglu_oai":
        s = _sigmoid(alpha * g)
        by_g, by_u = s * (1 + alpha * g * (1 - s)) * (u + 1), g * s
    else:
        by_g, by_u = _SLOPE[activation](g) * u, _GATE[activation](g)
    if activation == "relu2":  # a mask, not a factor: 0 even if dh is NaN
        within_g = ~(g <= 0) if within_g is None else within_g & ~(g <= 0)
    return _gated(by_g, within_g), _gated(by_u, within_u)


def _gated(slope: Tensor, within: Tensor | None) -> Callable[[Tensor], Tensor]:
    if within is None:
        return lambda dh: dh * slope
    return lambda dh: (dh * slope).masked_fill(~within, 0.0)


def _clamped(g: Tensor, u: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    return (g, u) if limit is None else (g.clamp(max=limit), u.clamp(-limit, limit))


def _sigmoid(a: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-a))


def _tanh_of(a: Tensor) -> Tensor:
    return torch.tanh(_ROOT_2_BY_PI * (a + _CUBIC * a * a * a))


def _silu_slope(a: Tensor) -> Tensor:
    s = _sigmoid(a)
    return s * (1 + a * (1 - s))


def _gelu_slope(a: Tensor) -> Tensor:
    density = torch.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(a * _ROOT_HALF)) + a * density


def _gelu_tanh_slope(a: Tensor) -> Tensor:
    t = _tanh_of(a)
    return 0.5 * (1 + t) + 0.5 * a * (1 - t * t) * _ROOT_2_BY_PI * (1 + 3 * _CUBIC * a * a)


Function = Callable[[Tensor], Tensor]
_GATE: dict[str, Function] = {
    "silu": lambda a: a / (1 + torch.exp(-a)),
    "gelu": lambda a: 0.5 * a * (1 + torch.erf(a * _ROOT_HALF)),
    "gelu_tanh": lambda a: 0.5 * a * (1 + _tanh_of(a)),
    "relu2": lambda a: torch.relu(a).square(),
}
_SLOPE: dict[str, Function] = {
    "silu": _silu_slope,
    "gelu": _gelu_slope,
    "gelu_tanh": _gelu_tanh_slope,
    "relu2": lambda a: 2 * torch.relu(a),
}
