"""Product keys in plain PyTorch: the top k of each axis, their k * k sums, and the top k of those."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from goldsmith.cli.bench.subject import Subject, Variant

NAME = "topk"


def missing() -> str | None:
    return None


def prepare(subject: Subject) -> Variant | None:
    if subject.name != "router.product_topk" or subject.options["k"] > min(
        subject.entry.sizes[a] for a in ("sx", "sy")
    ):
        return None
    tensors: dict[str, Any] = subject.fresh_leaves()
    options = {name: subject.options[name] for name in ("k", "log_softmax", "weights")}
    with torch.no_grad():
        theirs, ours = (call()[1].sort(-1).values for call in (lambda: route(**tensors, **options), _ours(subject)))
    differ = (theirs != ours).double().mean().item()
    note = f"ties fall as in torch.topk: {differ:.2g} of its selections are not ours"
    return Variant(NAME, lambda: route(**tensors, **options), list(tensors.values()), note=note)


def _ours(subject: Subject) -> Any:
    reference = subject.reference()
    return lambda: reference(subject.tensors)


def route(x: Tensor, y: Tensor, k: int, log_softmax: bool, weights: str) -> tuple[Tensor, Tensor]:
    """product_topk with float32 sums, ties broken as torch.topk breaks them, and no masks."""
    size = y.shape[-1]
    a, b = (part.float().log_softmax(-1).topk(k) if log_softmax else part.float().topk(k) for part in (x, y))
    best = (a.values[..., :, None] + b.values[..., None, :]).flatten(-2).topk(k)
    indices = (a.indices[..., :, None] * size + b.indices[..., None, :]).flatten(-2).gather(-1, best.indices)
    scores = best.values
    if weights != "none":
        scores = scores.exp() if weights == "exp" else scores.softmax(-1)
    return scores, indices
