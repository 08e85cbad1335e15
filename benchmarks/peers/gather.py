"""Tiny experts in plain PyTorch where not all rows fit: gather and einsum, a few tokens at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from goldsmith.cli.bench.subject import Subject, Variant

from .embedding_bag import ACTIVATE, looked_up

NAME = "gather"
CHUNK_BYTES = 64 * 2**20  # of rows gathered from a table at a time


def missing() -> str | None:
    return None


def prepare(subject: Subject) -> Variant | None:
    note = f"gathers {CHUNK_BYTES >> 20} MiB of rows at a time; autograd keeps them all"
    return looked_up(subject, NAME, lookup, note)


def lookup(h: Tensor, w_in: Tensor | None, w_out: Tensor, weights: Tensor, indices: Tensor, activation: str) -> Tensor:
    """y = sum_j weights[j] * act(<h, w_in[e_j]>) * w_out[e_j]; every index in [0, N)."""
    at, k = indices.reshape(-1, indices.shape[-1]), indices.shape[-1]
    rows, scale = h.reshape(len(at), -1), weights.reshape(at.shape)
    size = max(1, CHUNK_BYTES // max(1, k * w_out.shape[1] * w_out.dtype.itemsize))
    chunks = []
    for some, values, x in zip(at.split(size), scale.split(size), rows.split(size), strict=True):
        if w_in is not None:
            dots = torch.einsum("td,tkd->tk", x, functional.embedding(some, w_in))
            values = values * ACTIVATE[activation](dots)
        chunks.append(torch.einsum("tk,tke->te", values.to(w_out.dtype), functional.embedding(some, w_out)))
    return torch.cat(chunks).reshape(*h.shape[:-1], -1)
