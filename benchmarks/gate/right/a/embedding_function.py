"""Right: gather in the forward, and a sorted sum for each used row in the backward."""

import torch

PROBLEM = "a_embedding"
STATUS = "accepted"


class Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, index):
        ctx.save_for_backward(index)
        ctx.rows = len(table)
        return table.index_select(0, index)

    @staticmethod
    def backward(ctx, grad_y):
        (index,) = ctx.saved_tensors
        grad = grad_y.new_zeros(ctx.rows, grad_y.shape[1])
        for row in index.unique().tolist():
            grad[row] = grad_y[index == row].sum(0)
        return grad, None


candidate = Embedding.apply
