"""Quantises the weight to 8 bits in groups of 16 rows at every call."""

import torch

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"lowered_precision"}


def candidate(x, w, b):
    groups = w.contiguous().unflatten(0, (-1, 16)) if len(w) % 16 == 0 else w[None]
    scale = groups.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return torch.addmm(b, x, ((groups / scale).round() * scale).flatten(0, 1))
