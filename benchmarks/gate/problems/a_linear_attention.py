"""Causal linear attention: the state S[t] = S[t - 1] + k[t] v[t]^T, and y[t] = q[t] S[t]."""

import torch

from goldsmith import assay


@assay.case(H=[2], T=[18, 1], D=[8])
def heads(make, H, T, D):
    return {name: make.normal(H, T, D, std=0.5) for name in ("q", "k", "v")}


cases = heads


def golden(q, k, v):
    state = (k[..., :, None] * v[..., None, :]).cumsum(1)
    return torch.einsum("htd,htde->hte", q, state)
