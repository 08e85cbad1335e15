"""Right: Triton computes y and 1/rms in one pass; torch computes the backward."""

import torch
import triton
import triton.language as tl

PROBLEM = "a_rmsnorm"
STATUS = "accepted"


@triton.jit
def _rmsnorm_kernel(x_ptr, w_ptr, y_ptr, inv_ptr, D, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0)
    inv = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    tl.store(inv_ptr + row, inv)
    tl.store(y_ptr + row * D + d, x * inv * w, mask=d < D)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        x, w = x.contiguous(), w.contiguous()
        rows, D = x.shape
        y, inv = torch.empty_like(x), x.new_empty(rows, 1)
        _rmsnorm_kernel[(rows,)](x, w, y, inv, D, eps, BLOCK=triton.next_power_of_2(D))
        ctx.save_for_backward(x, w, inv)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x, w, inv = ctx.saved_tensors
        normal, grad = x * inv, grad_y * w
        grad_x = inv * (grad - normal * (grad * normal).mean(-1, keepdim=True))
        return grad_x, (grad_y * normal).sum(0), None


candidate = RMSNorm.apply
