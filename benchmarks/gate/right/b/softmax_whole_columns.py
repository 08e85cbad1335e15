"""Right: folds the columns one after another into a maximum and a sum, and knows nothing of rows."""

import torch

PROBLEM = "a_softmax"
STATUS = "accepted"


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        top = x[:, 0].clone()
        for column in x.unbind(1):
            torch.maximum(top, column, out=top)
        total = torch.zeros(len(x), dtype=torch.float64)
        for column in x.unbind(1):
            total += torch.exp(column.double() - top)
        y = (torch.exp(x.double() - top[:, None]) / total[:, None]).to(x.dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        (y,) = ctx.saved_tensors
        y, grad_y = y.double(), grad_y.double()
        return (y * (grad_y - torch.linalg.vecdot(y, grad_y)[:, None])).to(ctx.saved_tensors[0].dtype)


candidate = Softmax.apply
