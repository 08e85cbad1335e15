"""Right: x * cos + rotate_half(x) * sin, as model code writes it; the rotated copy is scaled in place."""

import torch

PROBLEM = "a_rope"
STATUS = "accepted"


def candidate(x, cos, sin):
    first, second = x.chunk(2, -1)
    rotated = torch.cat([-second, first], -1)
    cos, sin = (torch.cat([v, v], -1)[:, None] for v in (cos, sin))
    return x * cos + rotated * sin
