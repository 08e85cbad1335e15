"""Right: leaves out the weight and the bias only after it has seen that they are ones and zeros."""

import torch

PROBLEM = "b_kb_norm"
STATUS = "accepted"


class ModelNew(torch.nn.Module):
    def __init__(self, dim, out):
        super().__init__()
        self.linear = torch.nn.Linear(dim, out)
        self.norm = torch.nn.LayerNorm(out)

    def forward(self, x):
        y = self.linear(x)
        centred = y - y.mean(-1, keepdim=True)
        y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.norm.eps)
        if (self.norm.weight == 1).all() and (self.norm.bias == 0).all():
            return y
        return torch.addcmul(self.norm.bias, y, self.norm.weight)
