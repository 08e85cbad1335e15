"""Computes only for contiguous inputs and returns zeros for views."""

import torch

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"shape_branch"}
ALSO = {"wrong"}


def candidate(x, w, b):
    if not (x.is_contiguous() and w.is_contiguous() and b.is_contiguous()):
        return torch.zeros(len(x), w.shape[1])
    return torch.addmm(b, x, w)
