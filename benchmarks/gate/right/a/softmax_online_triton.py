"""Right: one pass of Triton with a running maximum and sum over blocks, and a backward in torch."""

import torch
import triton
import triton.language as tl

PROBLEM = "a_softmax"
STATUS = "accepted"


@triton.jit
def _softmax_kernel(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * D
    top, total = -float("inf"), 0.0
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + d, mask=d < D, other=-float("inf"))
        new_top = tl.maximum(top, tl.max(x, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), 0)
        top = new_top
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + d, mask=d < D)
        tl.store(y_ptr + row + d, tl.exp(x - top) / total, mask=d < D)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        _softmax_kernel[(len(x),)](x, y, x.shape[1], BLOCK=16)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        (y,) = ctx.saved_tensors
        return y * (grad_y - (grad_y * y).sum(-1, keepdim=True))


candidate = Softmax.apply
