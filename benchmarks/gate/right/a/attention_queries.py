"""Right: a loop over queries that reads only the keys up to each query, without a mask."""

import torch

PROBLEM = "a_attention"
STATUS = "accepted"


def candidate(q, k, v):
    rows = []
    for t in range(q.shape[1]):
        scores = (k[:, : t + 1] @ q[:, t, :, None])[..., 0] * q.shape[-1] ** -0.5
        rows.append((torch.softmax(scores, -1)[:, None] @ v[:, : t + 1])[:, 0])
    return torch.stack(rows, 1)
