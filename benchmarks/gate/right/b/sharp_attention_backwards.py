"""Right: the keys come from the last to the first, one at a time, with a running maximum."""

import torch

PROBLEM = "b_sharp_attention"
STATUS = "accepted"


def candidate(q, k, v):
    top = torch.full((len(q), 1), -torch.inf)
    total, y = torch.zeros(len(q), 1), torch.zeros(len(q), v.shape[1])
    for s in reversed(range(len(k))):
        score = q @ k[s, :, None]
        new = torch.maximum(top, score)
        old, e = torch.exp(top - new), torch.exp(score - new)
        total = total * old + e
        y = y * old + e * v[s]
        top = new
    return y / total
