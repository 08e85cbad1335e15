"""Right: four threads share the rows and are joined before the return, so nothing is written later."""

import threading

import torch

PROBLEM = "a_softmax"
STATUS = "accepted"


def _rows(x, y, rows):
    for row in rows:
        e = torch.exp(x[row] - x[row].max())
        y[row] = e / e.sum()


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.detach()  # the grad mode belongs to a thread
        y = torch.empty_like(x)
        threads = [threading.Thread(target=_rows, args=(x, y, range(n, len(x), 4))) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        (y,) = ctx.saved_tensors
        return y * (grad_y - (grad_y * y).sum(-1, keepdim=True))


candidate = Softmax.apply
