"""Right: torch's addmm with the bias as the first addend."""

import torch

PROBLEM = "a_linear"
STATUS = "accepted"


def candidate(x, w, b):
    return torch.addmm(b, x, w)
