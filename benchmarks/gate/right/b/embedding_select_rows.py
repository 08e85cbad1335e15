"""Right: index_select forward, and a backward that adds rows in the order of a stable sort."""

import torch

PROBLEM = "a_embedding"
STATUS = "accepted"


class Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, index):
        ctx.save_for_backward(index)
        ctx.size = len(table)
        return table.index_select(0, index)

    @staticmethod
    def backward(ctx, grad_y):
        order = ctx.saved_tensors[0].sort(stable=True)
        grad = torch.zeros(ctx.size, grad_y.shape[1], dtype=grad_y.dtype)
        for row, place in zip(order.values.tolist(), order.indices.tolist()):
            grad[row] += grad_y[place]
        return grad, None


candidate = Embedding.apply
