"""Right: a loop over tokens and their experts, as a decoder with one token computes it."""

import torch

PROBLEM = "a_moe"
STATUS = "accepted"


def candidate(x, gate, w, k):
    scores = x @ gate
    best, index = torch.sort(scores, -1, descending=True)
    best, index = best[:, :k], index[:, :k]
    weight = torch.exp(best - best.amax(-1, keepdim=True))
    weight = weight / weight.sum(-1, keepdim=True)
    rows = []
    for t, experts in enumerate(index.tolist()):
        rows.append(sum(weight[t, j] * (x[t] @ w[e]) for j, e in enumerate(experts)))
    return torch.stack(rows), index
