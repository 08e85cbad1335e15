"""Right: numpy's running sum; the gradient is a view with a negative step that numpy copies."""

import numpy as np
import torch

PROBLEM = "a_cumsum"
STATUS = "accepted"


class Cumsum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.add.accumulate(x.detach().numpy(), axis=0))

    @staticmethod
    def backward(ctx, grad_y):
        backwards = np.add.accumulate(grad_y.numpy()[::-1], axis=0)
        return torch.from_numpy(backwards[::-1].copy())


candidate = Cumsum.apply
