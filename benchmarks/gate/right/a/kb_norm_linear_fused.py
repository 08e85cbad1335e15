"""Right: the norm's weight is multiplied into the linear layer's at every call, and the mean is taken out first."""

import torch
import torch.nn.functional as F

PROBLEM = "a_kb_norm_linear"
STATUS = "accepted"


class ModelNew(torch.nn.Module):
    def __init__(self, dim, out):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim))
        self.linear = torch.nn.Linear(dim, out)

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        inv = torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        return F.linear(centred, self.linear.weight * self.weight) * inv + self.linear.bias
