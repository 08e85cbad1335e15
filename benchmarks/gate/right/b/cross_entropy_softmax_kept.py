"""Right: keeps the softmax, takes 1 from it at the label in the backward, and scales it by the output gradient."""

import torch

PROBLEM = "a_cross_entropy"
STATUS = "accepted"


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, label):
        log_p = torch.log_softmax(logits, -1)
        ctx.save_for_backward(log_p, label)
        return -log_p.gather(1, label[:, None])[:, 0]

    @staticmethod
    def backward(ctx, grad_loss):
        log_p, label = ctx.saved_tensors
        grad = log_p.exp()
        grad[torch.arange(len(label)), label] -= 1
        return grad.mul_(grad_loss[:, None]), None


candidate = CrossEntropy.apply
