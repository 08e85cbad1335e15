"""The primitives that run a reduction in another way: in blocks, over other axes, with another total."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..golden_edit import OperatorCall
from .spans import Span

_REDUCE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "linalg_vector_norm": torch.linalg.vector_norm,
}  # fmt: skip


def neutral(name: str) -> float:
    """The neutral element of a reduction."""
    if name in ("amax", "logsumexp", "max", "argmax"):
        return -torch.inf
    return torch.inf if name == "amin" else 1.0 if name == "prod" else 0.0


# other axes


def reduce_over(call: OperatorCall, *, axes: tuple[int, ...], own: tuple[int, ...], keep: bool) -> Tensor:
    """Over all axes in place of some, or over one in place of several; the result broadcasts."""
    x = call.x
    out = _REDUCE[call.name](x, dim=axes, keepdim=True)
    if len(axes) <= len(own):
        return out
    return out.expand(x.shape).amax(own, keep)


# softmax


def softmax_total(
    call: OperatorCall, *, axis: int, of: str, span: Span | None = None, count: int = 0, other: int = 0
) -> Tensor:
    """A softmax, or its logarithm, with another total: of a span, of the last entry, or with zeros taking part."""
    x, log = call.x, call.name == "_log_softmax"
    away = x
    if of == "span" and span is not None:
        lo, hi = span.of(x.shape[axis])
        total = torch.logsumexp(x.narrow(axis, lo, hi - lo), axis, keepdim=True)
    elif of == "last":
        total = x.narrow(axis, x.shape[axis] - 1, 1)
    elif of == "maximum":
        total = x.amax(axis, keepdim=True)
    elif of == "zeros":
        zeros = torch.tensor(float(count)).double().log()
        total = torch.logaddexp(torch.logsumexp(x, axis, keepdim=True), zeros)
    else:  # "other axis"
        away = x - x.amax(axis, keepdim=True)
        total = torch.logsumexp(away, other, keepdim=True)
    return away - total if log else torch.exp(away - total)


def softmax_from(call: OperatorCall, *, of: Callable[[Tensor, Tensor, Tensor], Tensor], axis: int) -> Tensor:
    """A softmax by a formula of its argument x, the maximum m, and log(sum(exp(x - m)))."""
    x = call.x
    m = x.amax(axis, keepdim=True)
    log_probs = of(x, m, torch.logsumexp(x, axis, keepdim=True) - m)
    return log_probs if call.name == "_log_softmax" else torch.exp(log_probs)


def softmax_apart(call: OperatorCall, *, axis: int, of_sum: bool, c: float) -> Tensor:
    """A softmax whose argument is multiplied by c in its sum alone, or everywhere else."""
    argument, summed = (call.x, c * call.x) if of_sum else (c * call.x, call.x)
    log_probs = argument - torch.logsumexp(summed, axis, keepdim=True)
    return log_probs if call.name == "_log_softmax" else torch.exp(log_probs)


def logsumexp_from(
    call: OperatorCall, *, of: Callable[[Tensor, Tensor], Tensor], axes: tuple[int, ...], keep: bool
) -> Tensor:
    m = call.x.amax(axes, keepdim=keep)
    return of(m, torch.logsumexp(call.x, axes, keep) - m)


def early_exponentials(x: Tensor, *, axis: int, block: int) -> Tensor:
    """exp(x - the maximum at the time x was read)."""
    running = torch.cummax(torch.stack([b.amax(axis) for b in x.split(block, axis)], axis), axis).values
    then = running.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    return torch.exp(x - then).nan_to_num()  # -inf from -inf: masked, as is everything before it


def early_factors(x: Tensor, *, axis: int, block: int) -> Tensor:
    return early_exponentials(x.log(), axis=axis, block=block)


def online_softmax(call: OperatorCall, *, axis: int, block: int, which: str) -> Tensor:
    """One pass over blocks (0: a recurrence, rescaled when read) without rescaling the sum or the accumulator."""
    x, last = call.x, call.x.amax(axis, keepdim=True)
    early = early_exponentials(x, axis=axis, block=block) if block else _step_by_step(x, axis)
    total = (early if "sum" in which else torch.exp(x - last)).sum(axis, keepdim=True)
    if call.name == "_log_softmax":
        return x - last - total.log()
    return ((early if "accumulator" in which else torch.exp(x - last)) / total).nan_to_num()


def online_logsumexp(call: OperatorCall, *, axis: int, block: int, keep: bool) -> Tensor:
    return early_exponentials(call.x, axis=axis, block=block).sum(axis, keep).log() + call.x.amax(axis, keep)


def _step_by_step(x: Tensor, axis: int) -> Tensor:
    """A state accumulated up to each row's last place, and rescaled to the row's maximum only when read."""
    place = torch.arange(x.shape[axis], device=x.device).view([-1 if d == axis else 1 for d in range(x.dim())])
    last = torch.where(x > -torch.inf, place, 0).amax(axis, keepdim=True)
    before, top = x.masked_fill(place >= last, -torch.inf), x.amax(axis, keepdim=True)
    state = early_exponentials(before, axis=axis, block=1) * torch.exp(before.amax(axis, keepdim=True) - top)
    return state.nan_to_num() + torch.where(place == last, torch.exp(x - top), 0.0)
