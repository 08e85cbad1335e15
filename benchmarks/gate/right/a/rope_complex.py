"""Right: pairs become complex numbers and are multiplied by exp(i angle)."""

import torch

PROBLEM = "a_rope"
STATUS = "accepted"


def candidate(x, cos, sin):
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    turned = pairs * torch.complex(cos, sin)[:, None]
    return torch.cat([turned.real, turned.imag], -1)
