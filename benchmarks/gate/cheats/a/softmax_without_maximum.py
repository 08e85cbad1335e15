"""Does not subtract the maximum, which overflows for large inputs only."""

import torch

PROBLEM = "a_wide_softmax"
STATUS = "wrong"


def candidate(x):
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)
