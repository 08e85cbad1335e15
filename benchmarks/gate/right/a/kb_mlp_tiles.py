"""Right: tiles of hidden units, so the whole hidden layer never exists."""

import torch
import torch.nn.functional as F

PROBLEM = "a_kb_mlp"
STATUS = "accepted"


class ModelNew(torch.nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = torch.nn.Linear(dim, hidden)
        self.down = torch.nn.Linear(hidden, dim)

    def forward(self, x):
        y = self.down.bias.expand(len(x), -1)
        for start in range(0, self.up.out_features, 16):
            tile = slice(start, start + 16)
            h = F.linear(x, self.up.weight[tile], self.up.bias[tile]).clamp(min=0)
            y = y + h @ self.down.weight[:, tile].T
        return y
