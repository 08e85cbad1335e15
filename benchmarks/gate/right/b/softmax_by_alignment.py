"""Right: takes rows in fours where the address is a multiple of 16, and one at a time elsewhere."""

import torch

PROBLEM = "a_softmax"
STATUS = "accepted"


def _rows(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def candidate(x):
    rows = 4 if x.data_ptr() % 16 == 0 else 1
    return torch.cat([_rows(part) for part in x.split(rows)])
