"""Right: a ring buffer of the last K inputs, as in decoding; the buffer belongs to the call."""

import torch

PROBLEM = "a_causal_conv"
STATUS = "accepted"


def candidate(x, w):
    B, C, T = x.shape
    ring = [x.new_zeros(B, C) for _ in range(w.shape[1])]
    steps = []
    for t in range(T):
        ring = [*ring[1:], x[..., t]]
        steps.append(sum(value * w[:, k] for k, value in enumerate(ring)))
    return torch.stack(steps, -1)
