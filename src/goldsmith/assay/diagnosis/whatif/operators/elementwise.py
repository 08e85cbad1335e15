"""Mistakes in one elementwise operator: terms, factors, signs and functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating, masks, replaced, whole
from ..change import Change, instead, with_arguments, with_result
from .epsilons import ROOTS

_ADDS = ("add", "add_", "sub", "sub_", "rsub")
_SCALES = ("mul", "mul_", "div", "div_")
_BENDS = (
    "exp", "exp_", "sigmoid", "tanh", "_softmax", "silu", "gelu", "_log_softmax", "relu", "softplus", "sin", "cos",
    "logsumexp",
)  # fmt: skip
_SKIPPED = (*ROOTS, "exp", "sigmoid", "tanh", "silu", "gelu", "relu", "softplus", "square", "abs", "sin", "cos")


def _inner(g: Tensor, y: Tensor, dim: int) -> Tensor:
    return (g * y).sum(dim, keepdim=True)


def _phi(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / 2**0.5))


_TURN = (2 * torch.pi) ** 0.5
Slope = tuple[str, str, Callable[..., Tensor]]
# torch's fused backward operators, written out as kernels do
_SLOPES: dict[str, tuple[Slope, ...]] = {
    "_softmax_backward_data": (
        ("sign_flip", "adds its inner product", lambda g, y, d, *a: y * (g + _inner(g, y, d))),
        ("missing_term", "lacks its inner product", lambda g, y, d, *a: y * g),
        ("wrong_factor", "lacks the factor of the probabilities", lambda g, y, d, *a: g - _inner(g, y, d)),
        ("wrong_factor", "sums without the probabilities", lambda g, y, d, *a: y * (g - g.sum(d, keepdim=True))),
        ("wrong_saved_tensor", "has an inner product with the probabilities before their division",
         lambda g, y, d, *a: y * (g - _inner(g, y, d) / y.amax(d, keepdim=True))),
        ("wrong_axis", "sums along another axis", lambda g, y, d, *a: y * (g - _inner(g, y, (d - 1) % g.dim()))),
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
}  # fmt: skip


# for integers, which positions are made of, the same mistakes have other names
_OF_PLACES = {"missing_term": "invalid_index", "repeated_term": "invalid_index", "wrong_factor": "wrong_stride"}


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    for change in _changes(call, calls):
        other = _OF_PLACES.get(change.cause) if whole(call.out) else None
        if other == "invalid_index" and any(a in (1, -1) for a in call.args[:2] if isinstance(a, int)):
            other = "off_by_one"
        yield change if other is None else replace(change, cause=other, also=(change.cause, *change.also))


def _changes(call: Node, calls: Sequence[Node]) -> Iterator[Change]:
    if call.name in _ADDS and len(call.args) > 1:
        yield from _sums(call, calls)
    if call.name in _SCALES and len(call.args) > 1:
        yield from _products(call)
        yield from _counted(call)
    if call.name in ("addmm", "baddbmm", "addcmul", "addmv"):
        yield from _biased(call)
    if call.name in _BENDS or call.name in ROOTS:
        yield from _scaled_arguments(call)
    if call.name in _SLOPES:
        for cause, text, make in _SLOPES[call.name]:
            yield Change(cause, f"{call.expression} {text}", call.index, instead(make), {}, 0.6)
    if call.name == "_softmax_backward_data":
        yield _inner_scaled(call)
    if call.name in _SKIPPED:
        yield _skipped(call)
    if call.name == "_log_softmax":
        text = f"the logarithm of the sum is left out of {call.expression}"
        yield Change("missing_term", text, call.index, instead(lambda x, *a: x.clone()), {"term": "logsumexp"}, 0.6)
    if call.name in _CLAMPS:
        text = f"the limits of {call.expression} are not applied"
        causes = ("empty_group", "wrong_mask") if _of_counts(call) else ("wrong_mask",)
        yield Change(causes[0], text, call.index, instead(lambda x, *a, **k: x.clone()), {}, 0.6, also=causes[1:])
    if call.name == "silu":
        text = f"sigmoid({_name(call, 0)}) stands in place of {call.expression}"
        yield Change("wrong_factor", text, call.index, instead(torch.sigmoid), {"factor": _name(call, 0)}, 0.6)
    if call.name in _BENDS or call.name in _CLAMPS:
        yield from _added_after(call, calls)
    if call.name in ("square", "pow"):
        yield _absolute(call)
    if isinstance(call.out, Tensor) and floating(call.out) and call.out.numel() and call.name not in _MOVES:
        prior = 0.45 if call.name == "neg" and call.backward else 0.3  # the sign of a gradient is easily forgotten
        yield Change(
            "sign_flip", f"{call.expression} has the other sign", call.index, with_result(torch.neg), {}, prior
        )


_CLAMPS = frozenset("clamp clamp_min clamp_max relu maximum minimum hardtanh".split())


def _inner_scaled(call: Node) -> Change:
    """The inner product scaled by a number: kernels take it from elsewhere, as a mean or with another scale."""

    def make(c: float) -> object:
        return instead(lambda g, y, d, *a: y * (g - c * _inner(g, y, d)))

    text = f"the inner product of {call.expression} is multiplied by"
    return Change("wrong_factor", text, call.index, make, {}, 0.5, free=1.0)


def _of_counts(call: Node) -> bool:
    """Whether it protects a division by the counts of empty groups: integers, some of them 0, clamped to 1."""
    x = call.args[0]
    counted = isinstance(x, Tensor) and x.numel() > 1 and bool((x == x.round()).all()) and bool((x >= 0).all())
    return (
        counted and isinstance(call.out, Tensor) and bool((call.out == x.clamp(min=1)).all()) and bool((x == 0).any())
    )


def _added_after(call: Node, calls: Sequence[Node]) -> Iterator[Change]:
    """f(a) + b in place of f(a + b)."""
    key = call.makers[0] if call.makers else -1
    before = calls[key] if isinstance(key, int) and 0 <= key < len(calls) else None
    if before is None or before.name not in ("add", "sub") or not all(isinstance(a, Tensor) for a in before.args[:2]):
        return
    a, b, s = before.args[0], before.args[1], float(before.kwargs.get("alpha", 1))
    s = -s if before.name == "sub" else s
    for i, (kept, added) in enumerate(((a, s * b), (s * b, a))):

        def after(func: Any, args: tuple, kwargs: dict, kept: Tensor = kept, added: Tensor = added) -> Any:
            return func(kept.expand_as(args[0]).contiguous(), *args[1:], **kwargs) + added

        term = _name(before, 1 - i)
        text = f"{term} is added after {call.name}, not before"
        yield Change("missing_term", text, call.index, after, {"term": term}, 0.4)


_MOVES = frozenset(
    """clone detach copy_ view expand unsqueeze t transpose permute alias squeeze slice select zeros ones full
    zeros_like ones_like cat _to_copy _unsafe_view fill_ zero_ new_zeros empty_like new_empty scalar_tensor arange
    as_strided lift_fresh""".split()
)  # a mistake in their result shows up elsewhere


def _name(call: Node, i: int) -> str:
    return call.operand(i) or f"an operand of {call.name}"


def _sums(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    """a + s b and a - s b: a term missing, twice, or with the other sign."""
    a, b = call.args[0], call.args[1]
    sign = -1.0 if call.name.startswith("sub") else 1.0
    if call.name == "rsub":
        a, b = b, a
        sign = -1.0
    s = sign * float(call.kwargs.get("alpha", 1))
    scalar = not isinstance(b, Tensor) or not isinstance(a, Tensor)
    flip = call.name == "rsub"
    first, second = (_name(call, 1), _name(call, 0)) if flip else (_name(call, 0), _name(call, 1))

    def of(x: float, y: float) -> Any:
        def make(p: Any, q: Any, **kwargs: Any) -> Tensor:
            p, q = (q, p) if flip else (p, q)
            total = (x * p if x else 0) + (y * s * q if y else 0)
            shape = torch.broadcast_shapes(*(t.shape for t in (p, q) if isinstance(t, Tensor)))
            return (total if isinstance(total, Tensor) else torch.zeros(())).expand(shape).clone()

        return instead(make)

    eps = scalar and isinstance(b, float) and abs(b) < 1e-2
    for name, (x, y) in ((second, (1, 0)), (first, (0, 1))):
        if scalar and (x, y) == (0, 1):
            continue
        cause, prior = ("absolute_eps", 0.75) if eps else ("missing_term", 0.8)
        text, also = f"{name} is left out of {call.expression}", tuple[str, ...]()
        if (x, y) == (1, 0) and _exclusive(call, calls):
            cause, also = "off_by_one", ("missing_term", "mask_shift")
            text = f"the running sum includes the position itself, and should end before it: {text}"
        yield Change(cause, text, call.index, of(x, y), {"term": name}, prior, also=also)
    for name, (x, y) in ((second, (1, 2)), (first, (2, 1))):
        if not scalar:
            text = f"{name} is added twice in {call.expression}"
            yield Change("repeated_term", text, call.index, of(x, y), {"term": name, "times": 2}, 0.6)
    yield Change(
        "sign_flip", f"{second} has the other sign in {call.expression}", call.index, of(1, -1), {"term": second}, 0.8
    )
    if not scalar:
        yield Change(
            "sign_flip", f"{first} has the other sign in {call.expression}", call.index, of(-1, 1), {"term": first}, 0.7
        )


def _exclusive(call: Node, calls: Sequence[Node]) -> bool:
    """Whether it is cumsum(x) - x, an exclusive prefix sum."""
    if not call.name.startswith("sub") or len(call.makers) != 2:
        return False
    key = call.makers[0]
    maker = calls[key] if isinstance(key, int) and 0 <= key < len(calls) else None
    return maker is not None and maker.name == "cumsum" and maker.makers[:1] == call.makers[1:]


def _counted(call: Node) -> Iterator[Change]:
    """A number of places, such as a distance, used as a factor and off by one."""
    for i, a in enumerate(call.args[:2]):
        if whole(a) and a.numel() > 1 and floating(call.out):
            for step, how in ((1, "one more"), (-1, "one less")):
                text = f"{call.operand(i) or 'a number'} is {how} in {call.expression}"
                change = with_arguments(lambda args, i=i, step=step: replaced(args, i, args[i] + step))
                params = {"operand": call.operand(i), "step": step}
                yield Change("off_by_one", text, call.index, change, params, 0.55, also=("wrong_factor", "shifted"))


def _products(call: Node) -> Iterator[Change]:
    """a b and a / b: a factor missing, applied twice, or dividing where it should multiply."""
    division = call.name.startswith("div")
    kinds = [(0, 1)] if division else [(0, 1), (1, 0)]
    for keep, other in kinds:
        value = call.args[other]
        if isinstance(value, Tensor) and not value.is_floating_point():
            continue
        name = _name(call, other)
        inverse = name if division else f"1/{name}"
        power = f"1/{name}" if division else name
        scalar = not isinstance(value, Tensor)
        if isinstance(value, Tensor) or isinstance(call.args[keep], Tensor):

            def dropped(*args: Any, keep: int = keep, **kwargs: Any) -> Tensor:
                shapes = [a.shape for a in args[:2] if isinstance(a, Tensor)]
                kept = args[keep] if isinstance(args[keep], Tensor) else torch.tensor(args[keep], dtype=torch.float64)
                return kept.expand(torch.broadcast_shapes(*shapes)).clone()

            params = {"factor": name, "named": inverse}
            cause, also = ("wrong_mask", ("wrong_factor",)) if masks(value) else ("wrong_factor", ())
            text = f"{name} is left out of {call.expression}"
            yield Change(cause, text, call.index, instead(dropped), params, 0.8, also=also)

        def again(func: Any, args: tuple, kwargs: dict, other: int = other) -> Any:
            out = func(*args, **kwargs)
            new = out / args[other] if division else out * args[other]
            return out.copy_(new) if func._schema.is_mutable else new

        def inverted(func: Any, args: tuple, kwargs: dict, other: int = other) -> Any:
            out = func(*args, **kwargs)
            new = out * args[other] ** 2 if division else out / args[other] ** 2
            return out.copy_(new) if func._schema.is_mutable else new

        params = {"factor": name, "named": power}
        yield Change("wrong_factor", f"{name} enters {call.expression} twice", call.index, again, params, 0.75)
        if floating(value) or (scalar and value):
            params = {"factor": name, "named": f"{name}^2" if division else f"1/{name}^2"}
            how = "multiplies" if division else "divides"
            yield Change("wrong_factor", f"{name} {how} in {call.expression}", call.index, inverted, params, 0.5)
        if scalar and isinstance(value, float | int):
            yield _free_scale(call)


def _free_scale(call: Node) -> Change:
    def make(c: float) -> object:
        return with_result(lambda out: out * c)

    return Change("wrong_factor", f"{call.expression} is multiplied by", call.index, make, {}, 0.45, free=1.0)


def _biased(call: Node) -> Iterator[Change]:
    name = _name(call, 0)

    def dropped(bias: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base: dict[str, Any] = {"addmm": torch.mm, "baddbmm": torch.bmm, "addcmul": torch.mul, "addmv": torch.mv}
        return base[call.name](*args)

    def signed(factor: float) -> Any:
        return with_arguments(lambda args: replaced(args, 0, args[0] * factor))

    yield Change(
        "missing_term", f"{name} is left out of {call.expression}", call.index, instead(dropped), {"term": name}, 0.8
    )
    yield Change(
        "sign_flip", f"{name} has the other sign in {call.expression}", call.index, signed(-1), {"term": name}, 0.7
    )
    text = f"{name} is added twice in {call.expression}"
    yield Change("repeated_term", text, call.index, signed(2), {"term": name, "times": 2}, 0.6)


def _scaled_arguments(call: Node) -> Iterator[Change]:
    """f(c x): a factor inside a function that cannot be moved outside."""

    def make(c: float) -> object:
        return with_arguments(lambda args: replaced(args, 0, args[0] * c))

    text = f"the argument of {call.expression} is multiplied by"
    yield Change("wrong_factor", text, call.index, make, {}, 0.6, free=1.0)


def _skipped(call: Node) -> Change:
    text = f"{call.name} is not applied to {_name(call, 0)}"
    cause = "wrong_saved_tensor" if call.backward else "wrong_factor"
    return Change(cause, text, call.index, instead(lambda x, *a, **k: x.clone()), {"function": call.name}, 0.35)


def _absolute(call: Node) -> Change:
    text = f"|{_name(call, 0)}| stands in place of {call.expression}"
    params = {"factor": _name(call, 0)}
    return Change("wrong_factor", text, call.index, instead(lambda x, *a, **k: x.abs()), params, 0.3)
