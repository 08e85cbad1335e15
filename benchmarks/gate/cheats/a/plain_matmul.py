"""Calls torch's matrix product although the problem asks for a kernel."""

import torch

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"plain_torch"}
KERNEL_ASKED = True


def candidate(x, w, b):
    return torch.addmm(b, x, w)
