"""Right: one multiply and add for each tap on a shifted view of the padded input."""

import torch.nn.functional as F

PROBLEM = "a_causal_conv"
STATUS = "accepted"


def candidate(x, w):
    T, K = x.shape[-1], w.shape[1]
    padded = F.pad(x, (K - 1, 0))
    y = padded[..., :T] * w[:, :1]
    for k in range(1, K):
        y = y + padded[..., k : k + T] * w[:, k, None]
    return y
