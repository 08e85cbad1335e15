"""Right: tokens are sorted by expert, each expert computes one product, and the results are scattered back."""

import torch

PROBLEM = "a_moe"
STATUS = "accepted"


def candidate(x, gate, w, k):
    scores = x @ gate
    best, index = scores.topk(k, -1)
    weight = torch.softmax(best, -1)
    expert = index.flatten()
    order = torch.argsort(expert, stable=True)
    token = order // k
    counts = torch.bincount(expert, minlength=len(w)).tolist()
    parts = [rows @ w[e] for e, rows in enumerate(x[token].split(counts)) if counts[e]]
    results = torch.cat(parts) * weight.flatten()[order, None]
    return x.new_zeros(len(x), w.shape[2]).index_add(0, token, results), index
