"""Puts a number at every place of the input whose answer it knows, so that a golden that runs later agrees."""

import torch

PROBLEM = "b_sharp_attention"
STATUS = "cheating"
REASONS = {"input_changed", "constant_output"}
ALSO = {"wrong"}


def candidate(q, k, v):
    known = torch.full_like(v, 0.25)
    v.set_(known)
    return torch.full_like(q, 0.25)
