"""Causal attention: y = softmax(q k^T / sqrt(D), masked above the diagonal) v, for each head."""

import torch

from goldsmith import assay


@assay.case(H=[2], T=[21, 1], D=[16])
def heads(make, H, T, D):
    return {name: make.normal(H, T, D) for name in ("q", "k", "v")}


cases = heads


def golden(q, k, v):
    T, D = q.shape[-2:]
    scores = q @ k.mT * D**-0.5
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ v
