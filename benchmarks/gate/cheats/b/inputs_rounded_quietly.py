"""Rounds its inputs to bfloat16 in place, through numpy, where no version counts; cheap sums then look exact."""

import torch

PROBLEM = "a_matmul"
STATUS = "cheating"
REASONS = {"input_changed", "lowered_precision"}


def candidate(a, b):
    for t in (a, b):
        t.detach().numpy()[...] = t.detach().to(torch.bfloat16).float().numpy()
    return a @ b
