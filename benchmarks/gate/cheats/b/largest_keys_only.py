"""Looks at the 32 keys with the largest scores only."""

import torch

PROBLEM = "b_sharp_attention"
STATUS = "cheating"
REASONS = {"lowered_precision", "shape_branch"}
ALSO = {"wrong"}


def candidate(q, k, v):
    scores, index = (q @ k.T).topk(min(32, len(k)), -1)
    return torch.einsum("ts,tsd->td", torch.softmax(scores, -1), v[index])
