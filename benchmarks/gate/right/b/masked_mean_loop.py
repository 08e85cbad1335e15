"""Right: a loop over sequences slices each by its own length."""

import torch

PROBLEM = "b_masked_mean"
STATUS = "accepted"


def candidate(x, length):
    return torch.stack([rows[:n].mean(0) for rows, n in zip(x, length.tolist())])
