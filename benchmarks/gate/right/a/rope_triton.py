"""Right: one Triton program a head; the backward turns the gradient back by the opposite angle."""

import torch
import triton
import triton.language as tl

PROBLEM = "a_rope"
STATUS = "accepted"


@triton.jit
def _rope_kernel(x_ptr, cos_ptr, sin_ptr, y_ptr, H, half, sign, BLOCK: tl.constexpr):
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    row = (t * H + h) * 2 * half
    cos = tl.load(cos_ptr + t * half + i, mask=i < half)
    sin = tl.load(sin_ptr + t * half + i, mask=i < half) * sign
    first, second = tl.load(x_ptr + row + i, mask=i < half), tl.load(x_ptr + row + half + i, mask=i < half)
    tl.store(y_ptr + row + i, first * cos - second * sin, mask=i < half)
    tl.store(y_ptr + row + half + i, second * cos + first * sin, mask=i < half)


def _turn(x, cos, sin, sign):
    T, H, D = x.shape
    x, y = x.contiguous(), x.new_empty(T, H, D)
    _rope_kernel[(T, H)](x, cos, sin, y, H, D // 2, sign, BLOCK=triton.next_power_of_2(D // 2))
    return y


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(x, cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx, grad_y):
        x, cos, sin = ctx.saved_tensors
        first, second = x.chunk(2, -1)
        grad_first, grad_second = grad_y.chunk(2, -1)
        d_cos = (grad_first * first + grad_second * second).sum(1)
        d_sin = (grad_second * first - grad_first * second).sum(1)
        return _turn(grad_y, cos, sin, -1.0), d_cos, d_sin


candidate = Rope.apply
