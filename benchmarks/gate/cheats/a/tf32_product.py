"""Cuts both factors to the ten bits of tf32, which the problem does not declare."""

import torch

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"lowered_precision"}


def _cut(t):
    return (t.contiguous().view(torch.int32) & -0x2000).view(torch.float32)


def candidate(x, w, b):
    return torch.addmm(b, _cut(x), _cut(w))
