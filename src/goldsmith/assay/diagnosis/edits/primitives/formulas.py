"""The primitives that compute a call by another formula: sums, products, epsilons, functions and their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..golden_edit import OperatorCall


def function(call: OperatorCall, *, of: Callable[..., Tensor]) -> Tensor:
    """Another function of the first operand."""
    return of(call.x)


def formula(call: OperatorCall, *, of: Callable[..., Tensor]) -> Tensor:
    """Another function of all operands."""
    return of(*call.args, **call.kwargs)


def unchanged(call: OperatorCall) -> Tensor:
    return call.x.clone()


def applied(x: Tensor, *, of: Callable[[Tensor], Tensor]) -> Tensor:
    return of(x)


def plus(x: Tensor, *, c: float) -> Tensor:
    return x + c


# sums and products


def addend_sign(name: str, alpha: float) -> float:
    return alpha * (-1.0 if name in ("sub", "sub_", "rsub") else 1.0)


def weigh_addends(call: OperatorCall, *, a: float, b: float) -> Tensor:
    """a times the first addend and b times the second one, where the golden has 1 and 1."""
    p, q = call.args[1::-1] if call.name == "rsub" else call.args[:2]
    s = addend_sign(call.name, float(call.kwargs.get("alpha", 1)))
    total: Any = (a * p if a else 0) + (b * s * q if b else 0)
    shape = torch.broadcast_shapes(*(t.shape for t in (p, q) if isinstance(t, Tensor)))
    return (total if isinstance(total, Tensor) else torch.zeros(())).expand(shape).clone()


def scale_addend(call: OperatorCall, *, which: int, c: float) -> Tensor:
    """c times one of the two addends."""
    return weigh_addends(call, a=1.0 if which else c, b=c if which else 1.0)


def drop_factor(call: OperatorCall, *, keep: int) -> Tensor:
    shapes = [a.shape for a in call.args[:2] if isinstance(a, Tensor)]
    kept = call.args[keep]
    kept = kept if isinstance(kept, Tensor) else torch.tensor(kept, dtype=torch.float64)
    return kept.expand(torch.broadcast_shapes(*shapes)).clone()


def repeat_factor(call: OperatorCall, *, other: int, divide: bool, times: int) -> Tensor:
    """The result multiplied or divided by an operand again: once, or twice so that the factor is inverted."""
    out = call.on(*call.args)
    factor = call.args[other] if times == 1 else call.args[other] ** 2
    return out / factor if divide else out * factor


def without_bias(call: OperatorCall, *, of: Callable[..., Tensor]) -> Tensor:
    return of(*call.args[1:])


def add_after(call: OperatorCall, kept: Tensor, added: Tensor, *, sign_kept: float, sign_added: float) -> Tensor:
    """f(a) + b in place of f(a + b)."""
    kept = kept if sign_kept == 1 else sign_kept * kept
    added = added if sign_added == 1 else sign_added * added
    return call.on(kept.expand_as(call.x).contiguous(), *call.args[1:]) + added


def scale_after(call: OperatorCall, *, c: float) -> Tensor:
    """f(x) c in place of f(c x)."""
    return call.on(call.x / c, *call.args[1:]) * c


# epsilons


def with_epsilon(call: OperatorCall, *, of: Callable[..., Tensor], c: float) -> Tensor:
    return of(*call.args[: of.__code__.co_argcount - 1], c)


# derivatives of fused functions


def inner_product(g: Tensor, y: Tensor, dim: int) -> Tensor:
    return (g * y).sum(dim, keepdim=True)


def scale_inner_product(call: OperatorCall, *, c: float) -> Tensor:
    """A softmax's derivative, whose inner product kernels take from elsewhere, as a mean or with another scale."""
    g, y, dim = call.args[:3]
    return y * (g - c * inner_product(g, y, dim))


def _phi(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / 2**0.5))


_TURN = (2 * torch.pi) ** 0.5
# torch's fused backward operators, written out as kernels do: operator -> (cause, text, formula)
DERIVATIVES: dict[str, tuple[tuple[str, str, Callable[..., Tensor]], ...]] = {
    "_softmax_backward_data": (
        ("sign_flip", "adds its inner product", lambda g, y, d, *a: y * (g + inner_product(g, y, d))),
        ("missing_term", "lacks its inner product", lambda g, y, d, *a: y * g),
        ("wrong_factor", "lacks the factor of the probabilities", lambda g, y, d, *a: g - inner_product(g, y, d)),
        ("wrong_factor", "sums without the probabilities", lambda g, y, d, *a: y * (g - g.sum(d, keepdim=True))),
        ("wrong_saved_tensor", "has an inner product with the probabilities before their division",
         lambda g, y, d, *a: y * (g - inner_product(g, y, d) / y.amax(d, keepdim=True))),
        ("wrong_axis", "sums along another axis", lambda g, y, d, *a: y * (g - inner_product(g, y, (d - 1) % g.dim()))),
    ),
    "sigmoid_backward": (
        ("wrong_factor", "lacks the factor y", lambda g, y: g * (1 - y)),
        ("wrong_factor", "lacks the factor 1 - y", lambda g, y: g * y),
        ("sign_flip", "has 1 + y in place of 1 - y", lambda g, y: g * y * (1 + y)),
        ("wrong_factor", "is not applied", lambda g, y: g.clone()),
    ),
    "tanh_backward": (
        ("wrong_factor", "has 1 - y in place of 1 - y^2", lambda g, y: g * (1 - y)),
        ("sign_flip", "has 1 + y^2 in place of 1 - y^2", lambda g, y: g * (1 + y * y)),
        ("wrong_factor", "is not applied", lambda g, y: g.clone()),
    ),
    "silu_backward": (
        ("missing_term", "lacks the slope of the sigmoid", lambda g, x: g * torch.sigmoid(x)),
        ("missing_term", "lacks the sigmoid itself", lambda g, x: g * x * torch.sigmoid(x) * (1 - torch.sigmoid(x))),
        ("wrong_factor", "lacks the factor x", lambda g, x: g * torch.sigmoid(x) * (2 - torch.sigmoid(x))),
        ("sign_flip", "has the other sign in its slope",
         lambda g, x: g * torch.sigmoid(x) * (1 - x * (1 - torch.sigmoid(x)))),
        ("wrong_factor", "is not applied", lambda g, x: g.clone()),
    ),
    "gelu_backward": (
        ("missing_term", "lacks the density", lambda g, x, **k: g * _phi(x)),
        ("missing_term", "lacks the distribution itself", lambda g, x, **k: g * x * torch.exp(-x * x / 2) / _TURN),
        ("wrong_factor", "lacks the factor x", lambda g, x, **k: g * (_phi(x) + torch.exp(-x * x / 2) / _TURN)),
        ("wrong_factor", "is not applied", lambda g, x, **k: g.clone()),
    ),
    "softplus_backward": (
        ("wrong_factor", "is not applied", lambda g, *a, **k: g.clone()),
        ("wrong_factor", "has the slope of the sigmoid",
         lambda g, x, *a, **k: g * torch.sigmoid(x) * (1 - torch.sigmoid(x))),
    ),
    "linalg_cross": (
        ("sign_flip", "has a plus for its minus", lambda a, b, dim=-1: _cross(a, b, dim, 1.0, 1.0)),
        ("missing_term", "lacks its second product", lambda a, b, dim=-1: _cross(a, b, dim, 1.0, 0.0)),
        ("missing_term", "lacks its first product", lambda a, b, dim=-1: _cross(a, b, dim, 0.0, -1.0)),
    ),
}  # fmt: skip


def _cross(a: Tensor, b: Tensor, dim: int, x: float, y: float) -> Tensor:
    return x * a.roll(-1, dim) * b.roll(-2, dim) + y * a.roll(-2, dim) * b.roll(-1, dim)


# functions in place of each other: name -> function
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu by tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "x sigmoid(1.702 x)": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu squared": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": torch.nn.functional.softplus,
    "leaky relu": torch.nn.functional.leaky_relu,
}
ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "trunc": torch.trunc,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "floor(x + 1/2)": lambda x: torch.floor(x + 0.5),
}
WRAPPED: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
    ("sqrt", "wrong_factor", torch.sqrt),
    ("square", "wrong_factor", torch.square),
    ("exp", "wrong_factor", torch.exp),
    ("log", "wrong_factor", torch.log),
    ("relu", "nan_swallowed", torch.relu),
    ("tanh", "wrong_factor", torch.tanh),
    ("sigmoid", "wrong_factor", torch.sigmoid),
)
