"""Right: numpy computes forward and backward; no torch kernel runs."""

import numpy as np
import torch

PROBLEM = "a_softmax"
STATUS = "accepted"


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        values = x.detach().numpy()
        with np.errstate(all="ignore"):
            e = np.exp(values - values.max(-1, keepdims=True))
            y = torch.from_numpy(e / e.sum(-1, keepdims=True))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        y, grad = ctx.saved_tensors[0].numpy(), grad_y.numpy()
        with np.errstate(all="ignore"):
            return torch.from_numpy(y * (grad - (grad * y).sum(-1, keepdims=True)))


candidate = Softmax.apply
