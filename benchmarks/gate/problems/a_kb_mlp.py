"""KernelBench-like: two linear layers with a ReLU between them."""

import torch


class Model(torch.nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = torch.nn.Linear(dim, hidden)
        self.down = torch.nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def get_init_inputs():
    return [24, 40]


def get_inputs():
    return [torch.randn(9, 24)]


backward = None
