"""Right: the vocabulary is read in chunks of 16 with a running sum; the backward recomputes the probabilities."""

import torch

PROBLEM = "a_cross_entropy"
STATUS = "accepted"


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, label):
        top = logits.amax(-1, keepdim=True)
        total = torch.zeros_like(top)
        for chunk in logits.split(16, 1):
            total += torch.exp(chunk - top).sum(-1, keepdim=True)
        log_total = total.log()
        ctx.save_for_backward(logits, label, top, log_total)
        return (log_total + (top - logits.gather(1, label[:, None])))[:, 0]

    @staticmethod
    def backward(ctx, grad_y):
        logits, label, top, log_total = ctx.saved_tensors
        grad = torch.exp(logits - top - log_total)
        rows = torch.arange(len(label))
        grad[rows, label] -= 1
        return grad * grad_y[:, None], None


candidate = CrossEntropy.apply
