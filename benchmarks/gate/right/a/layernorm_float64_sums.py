"""Right: sums run in float64, which is more than the problem asks for."""

import torch

PROBLEM = "a_layernorm"
STATUS = "accepted"


def candidate(x, w, b, eps):
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    inv = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * inv * w.double() + b.double()).to(x.dtype)
