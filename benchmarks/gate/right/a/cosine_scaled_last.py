"""Right: the product of the raw rows, scaled by both lengths afterwards."""

import torch

PROBLEM = "a_cosine"
STATUS = "accepted"


def candidate(x, z, eps):
    inv_x = torch.rsqrt(x.square().sum(-1) + eps)
    inv_z = torch.rsqrt(z.square().sum(-1) + eps)
    return x @ z.T * inv_x[:, None] * inv_z
