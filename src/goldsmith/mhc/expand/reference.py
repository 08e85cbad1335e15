"""mhc.expand in plain torch: y[t, i] = x[t] for each of the n streams, dx[t] = sum_i g[t, i]."""

from __future__ import annotations

from torch import Tensor

from ...core.tracing import stage
from .._common import sum_dtype


def forward(x: Tensor, *, n: int) -> tuple[Tensor]:
    return (stage("streams", x.unsqueeze(-2).repeat(*[1] * (x.dim() - 1), n, 1)),)


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    g = grads["streams"]
    return {"x": g.to(sum_dtype(g.dtype)).sum(-2).to(g.dtype)}
