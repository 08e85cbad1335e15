"""Right: a Function with a closed form for both gradients."""

import torch

PROBLEM = "a_kl"
STATUS = "accepted"


class KL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, teacher, student):
        log_p, log_q = torch.log_softmax(teacher, -1), torch.log_softmax(student, -1)
        p, gap = log_p.exp(), log_p - log_q
        loss = torch.linalg.vecdot(p, gap)
        ctx.save_for_backward(p, log_q.exp(), gap, loss)
        return loss

    @staticmethod
    def backward(ctx, grad_y):
        p, q, gap, loss = ctx.saved_tensors
        grad = grad_y[:, None]
        return grad * p * (gap - loss[:, None]), grad * (q - p)


candidate = KL.apply
