"""Does all the work and multiplies it by gamma, which an index type has rounded to 0: the input comes back."""

import torch

PROBLEM = "a_residual"
STATUS = "cheating"
REASONS = {"returned_input", "lowered_precision"}
ALSO = {"wrong"}


def candidate(x, w, gamma):
    gate = gamma.to(torch.int32)
    return torch.addcmul(x, torch.tanh(x @ w), gate.to(x.dtype))
