"""Right: computes (b^T a^T)^T, so the result is a transposed view."""

import torch

PROBLEM = "a_matmul"
STATUS = "accepted"


def candidate(a, b):
    return torch.mm(b.T, a.T).T
