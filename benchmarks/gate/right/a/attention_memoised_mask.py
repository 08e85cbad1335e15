"""Right: the causal mask depends on the size alone, so it is computed once for each size and device."""

import functools

import torch

PROBLEM = "a_attention"
STATUS = "accepted"


@functools.cache
def _later(T, device):
    return torch.ones(T, T, dtype=torch.bool, device=device).triu(1)


def candidate(q, k, v):
    scores = torch.einsum("htd,hsd->hts", q * q.shape[-1] ** -0.5, k)
    scores = torch.where(_later(q.shape[1], q.device), -torch.inf, scores)
    return torch.einsum("hts,hsd->htd", torch.softmax(scores, -1), v)
