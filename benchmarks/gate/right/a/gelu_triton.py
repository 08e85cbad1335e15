"""Right: forward and backward in Triton, over flat blocks of 32 elements."""

import torch
import triton
import triton.language as tl

PROBLEM = "a_gelu"
STATUS = "accepted"


@triton.jit
def _gelu_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476)), mask=i < n)


@triton.jit
def _gelu_grad_kernel(x_ptr, g_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, g = tl.load(x_ptr + i, mask=i < n), tl.load(g_ptr + i, mask=i < n)
    below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    tl.store(dx_ptr + i, g * (below + x * density), mask=i < n)


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        _gelu_kernel[(triton.cdiv(x.numel(), 32),)](x, y, x.numel(), BLOCK=32)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        (x,) = ctx.saved_tensors
        grad_y = grad_y.contiguous()
        dx = torch.empty_like(x)
        _gelu_grad_kernel[(triton.cdiv(x.numel(), 32),)](x, grad_y, dx, x.numel(), BLOCK=32)
        return dx


candidate = Gelu.apply
