"""Right: the backward runs the forward again under autograd, so only the input is saved."""

import torch

PROBLEM = "a_sinkhorn"
STATUS = "accepted"


def _steps(x):
    for _ in range(20):
        x = torch.log_softmax(torch.log_softmax(x, 2), 1)
    return x.exp()


class Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return _steps(x)

    @staticmethod
    def backward(ctx, grad_y):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(_steps(x), x, grad_y)


candidate = Sinkhorn.apply
