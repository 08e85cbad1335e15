"""Right: works on the transposed matrix, so that its result is a view that is not contiguous."""

import torch

PROBLEM = "b_kb_norm"
STATUS = "accepted"


class ModelNew(torch.nn.Module):
    def __init__(self, dim, out):
        super().__init__()
        self.linear = torch.nn.Linear(dim, out)
        self.norm = torch.nn.LayerNorm(out)

    def forward(self, x):
        y = torch.addmm(self.linear.bias[:, None], self.linear.weight, x.T)
        y = y - y.mean(0)
        y = y * torch.rsqrt(y.square().mean(0) + 1e-5)
        return (y * self.norm.weight[:, None] + self.norm.bias[:, None]).T
