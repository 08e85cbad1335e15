"""Right: the state is updated step by step, as flash-linear-attention's naive form does."""

import torch

PROBLEM = "a_linear_attention"
STATUS = "accepted"


def candidate(q, k, v):
    state = q.new_zeros(q.shape[0], q.shape[2], v.shape[2])
    rows = []
    for t in range(q.shape[1]):
        state = state + k[:, t, :, None] * v[:, t, None]
        rows.append((q[:, t, None] @ state)[:, 0])
    return torch.stack(rows, 1)
