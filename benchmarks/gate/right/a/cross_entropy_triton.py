"""Right: the forward also computes the gradient, as Liger does, and the backward scales it."""

import torch
import triton
import triton.language as tl

PROBLEM = "a_cross_entropy"
STATUS = "accepted"


@triton.jit
def _loss_kernel(x_ptr, label_ptr, loss_ptr, grad_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * V + v, mask=v < V, other=-float("inf"))
    label = tl.load(label_ptr + row)
    x = x - tl.max(x, 0)
    e = tl.exp(x)
    total = tl.sum(e, 0)
    hit = v == label
    tl.store(loss_ptr + row, tl.log(total) - tl.sum(tl.where(hit, x, 0.0), 0))
    tl.store(grad_ptr + row * V + v, e / total - tl.where(hit, 1.0, 0.0), mask=v < V)


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, label):
        logits, label = logits.contiguous(), label.contiguous()
        T, V = logits.shape
        loss, grad = logits.new_empty(T), torch.empty_like(logits)
        _loss_kernel[(T,)](logits, label, loss, grad, V, BLOCK=triton.next_power_of_2(V))
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    def backward(ctx, grad_y):
        return ctx.saved_tensors[0] * grad_y[:, None], None


candidate = CrossEntropy.apply
