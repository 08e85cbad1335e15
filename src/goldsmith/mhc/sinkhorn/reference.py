"""mhc.sinkhorn in plain torch. L [..., j, k]; rows are summed over k, columns over j."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.tracing import stage
from .._common import sum_dtype

ROWS, COLUMNS = -1, -2  # the axes over which row sums and column sums run


def forward(logits: Tensor, *, iterations: int, eps: float, form: str) -> tuple[Tensor]:
    return (stage("h_res", balanced(logits.to(sum_dtype(logits.dtype)), iterations=iterations, eps=eps, form=form)),)


def balanced(logits: Tensor, *, iterations: int, eps: float, form: str) -> Tensor:
    """P from logits in the dtype of the sums, by the steps of `form`."""
    return _FORMS[form][0](logits, iterations, eps)


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    logits = tensors["logits"]
    d_logits = gradient(grads["h_res"], logits.to(sum_dtype(logits.dtype)), **options)
    return {"logits": d_logits.to(logits.dtype)}


def gradient(grad: Tensor, logits: Tensor, *, iterations: int, eps: float, form: str) -> Tensor:
    """dL of the unrolled steps. The fixed point's gradient would be 73 % wrong on near-identity logits."""
    return _FORMS[form][1](grad, logits, iterations, eps)


def _deepseek(logits: Tensor, iterations: int, eps: float) -> Tensor:
    p, _ = _deepseek_steps(logits, iterations, eps)
    return p


def _deepseek_steps(logits: Tensor, iterations: int, eps: float) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """P and the (axis, denominator) of every step, from which the backward rebuilds each step."""
    p = torch.softmax(logits, ROWS) + eps
    denominators = []
    for axis in [COLUMNS, *[ROWS, COLUMNS] * (iterations - 1)]:
        d = p.sum(axis, keepdim=True) + eps
        p = p / d
        denominators.append((axis, d))
    return p, denominators


def _deepseek_gradient(g: Tensor, logits: Tensor, iterations: int, eps: float) -> Tensor:
    y, denominators = _deepseek_steps(logits, iterations, eps)
    for axis, d in reversed(denominators):
        g = (g - (g * y).sum(axis, keepdim=True)) / d
        y = y * d
    s = torch.softmax(logits, ROWS)  # the additive eps is a constant
    return s * (g - (g * s).sum(ROWS, keepdim=True))


def _megatron(logits: Tensor, iterations: int, eps: float) -> Tensor:
    p, _ = _megatron_steps(logits, iterations, eps)
    return p


def _megatron_steps(logits: Tensor, iterations: int, eps: float) -> tuple[Tensor, list[tuple[int, Tensor, Tensor]]]:
    p = torch.exp(logits - logits.amax(ROWS, keepdim=True)) if logits.shape[-1] else logits  # amax needs an element
    steps = []
    for axis in [ROWS, COLUMNS] * iterations:
        total = p.sum(axis, keepdim=True)
        d = total.clamp(min=eps)
        p = p / d
        steps.append((axis, d, total >= eps))
    return p, steps


def _megatron_gradient(g: Tensor, logits: Tensor, iterations: int, eps: float) -> Tensor:
    y, steps = _megatron_steps(logits, iterations, eps)
    for axis, d, free in reversed(steps):  # free: the denominator was not clamped; a clamped one is a constant
        g = (g - torch.where(free, (g * y).sum(axis, keepdim=True), 0.0)) / d
        y = y * d
    g = g * y
    top = logits == logits.amax(ROWS, keepdim=True)  # tied maxima share the gradient, as in autograd
    return g - g.sum(ROWS, keepdim=True) * top / top.sum(ROWS, keepdim=True)


def _log(logits: Tensor, iterations: int, eps: float) -> Tensor:
    steps = _log_steps(logits, iterations)
    f, g = steps[-1]
    return torch.exp(f + logits + g)


def _log_steps(logits: Tensor, iterations: int) -> list[tuple[Tensor, Tensor]]:
    """(f, g) after 0, 1, ... iterations; f broadcasts over k, g over j."""
    f, g = torch.zeros_like(logits[..., :1]), torch.zeros_like(logits[..., :1, :])
    steps = [(f, g)]
    for _ in range(iterations):
        f = -torch.logsumexp(logits + g, ROWS, keepdim=True)
        g = -torch.logsumexp(logits + f, COLUMNS, keepdim=True)
        steps.append((f, g))
    return steps


def _log_gradient(grad: Tensor, logits: Tensor, iterations: int, eps: float) -> Tensor:
    steps = _log_steps(logits, iterations)
    f, g = steps[-1]
    d_logits = grad * torch.exp(f + logits + g)
    df, dg = d_logits.sum(ROWS, keepdim=True), d_logits.sum(COLUMNS, keepdim=True)
    for (_, g_before), (f, g) in reversed(list(zip(steps, steps[1:], strict=False))):
        from_g = dg * torch.exp(logits + f + g)  # g = -logsumexp_j(L + f): weights sum to 1 over j
        from_f = (df - from_g.sum(ROWS, keepdim=True)) * torch.exp(logits + g_before + f)
        d_logits = d_logits - from_g - from_f
        df, dg = torch.zeros_like(df), -from_f.sum(COLUMNS, keepdim=True)
    return d_logits


_FORMS = {
    "deepseek": (_deepseek, _deepseek_gradient),
    "megatron": (_megatron, _megatron_gradient),
    "log": (_log, _log_gradient),
}
