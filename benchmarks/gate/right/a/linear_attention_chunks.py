"""Right: chunks of eight steps: a masked product inside a chunk, and the state of the earlier chunks."""

import torch

PROBLEM = "a_linear_attention"
STATUS = "accepted"


CHUNK = 8


def candidate(q, k, v):
    state = q.new_zeros(q.shape[0], q.shape[2], v.shape[2])
    rows = []
    for q_c, k_c, v_c in zip(q.split(CHUNK, 1), k.split(CHUNK, 1), v.split(CHUNK, 1)):
        rows.append((q_c @ k_c.mT).tril() @ v_c + q_c @ state)
        state = state + k_c.mT @ v_c
    return torch.cat(rows, 1)
