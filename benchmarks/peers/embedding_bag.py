"""Tiny experts in plain PyTorch: gathered rows, an einsum, and `embedding_bag` for the sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from goldsmith.cli.bench.subject import Subject, Variant

NAME = "embedding_bag"
ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda a: functional.relu(a).square(),
    "identity": lambda a: a,
}


def missing() -> str | None:
    return None


def prepare(subject: Subject) -> Variant | None:
    return looked_up(subject, NAME, lookup, "gathers [T, k, D]; weights in the tables' dtype")


def looked_up(subject: Subject, name: str, lookup: Callable[..., Tensor], note: str) -> Variant | None:
    """Atomic experts by another `lookup` with the same arguments; None where such a peer cannot compute the case."""
    if subject.name != "router.atomic_experts" or subject.options["sparse_grad"]:
        return None
    tensors: dict[str, Any] = subject.fresh_leaves()
    if bool((tensors["indices"] < 0).any()):
        return None  # this peer cannot skip an entry
    leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
    activation = subject.options["activation"]
    return Variant(name, lambda: lookup(**tensors, activation=activation), leaves, note=note)


def lookup(h: Tensor, w_in: Tensor | None, w_out: Tensor, weights: Tensor, indices: Tensor, activation: str) -> Tensor:
    """y = sum_j weights[j] * act(<h, w_in[e_j]>) * w_out[e_j]; every index in [0, N)."""
    at = indices.reshape(-1, indices.shape[-1])
    values = weights.reshape(at.shape)
    if w_in is not None:
        rows = functional.embedding(at, w_in)
        values = values * ACTIVATE[activation](torch.einsum("td,tkd->tk", h.reshape(len(at), -1), rows))
    values = values.to(w_out.dtype)
    if w_out.is_cuda and w_out.dtype == torch.bfloat16:  # embedding_bag has no gradient for bfloat16 weights
        y = torch.einsum("tk,tke->te", values, functional.embedding(at, w_out))
    else:
        y = functional.embedding_bag(at, w_out, per_sample_weights=values, mode="sum")
    return y.reshape(*h.shape[:-1], -1)
