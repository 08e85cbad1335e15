"""Right: the module keeps a hidden buffer between calls, which every call writes before it reads."""

import torch

PROBLEM = "a_kb_mlp"
STATUS = "accepted"


class ModelNew(torch.nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = torch.nn.Linear(dim, hidden)
        self.down = torch.nn.Linear(hidden, dim)
        self.hidden = None

    @torch.no_grad()
    def forward(self, x):
        if self.hidden is None or len(self.hidden) != len(x):
            self.hidden = torch.zeros(len(x), self.up.out_features, dtype=x.dtype, device=x.device)
        torch.addmm(self.up.bias, x, self.up.weight.T, out=self.hidden)
        self.hidden.relu_()
        return torch.addmm(self.down.bias, self.hidden, self.down.weight.T)
