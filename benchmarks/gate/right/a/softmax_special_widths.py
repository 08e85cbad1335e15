"""Right: one column has the constant result 1 and two columns are a sigmoid; all other widths take the general path."""

import torch

PROBLEM = "a_softmax"
STATUS = "accepted"


def candidate(x):
    if x.shape[1] == 1:
        return x - x + 1
    if x.shape[1] == 2:
        return torch.sigmoid(torch.stack([x[:, 0] - x[:, 1], x[:, 1] - x[:, 0]], 1))
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)
