"""Right: forward and backward in Triton; the backward writes sums of each row, and torch adds the rows."""

import torch
import triton
import triton.language as tl

PROBLEM = "a_layernorm"
STATUS = "accepted"


@triton.jit
def _forward_kernel(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, inv_ptr, D, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0)
    mean = tl.sum(x, 0) / D
    centred = tl.where(d < D, x - mean, 0.0)
    inv = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / D + eps)
    w, b = tl.load(w_ptr + d, mask=d < D), tl.load(b_ptr + d, mask=d < D)
    tl.store(y_ptr + row * D + d, centred * inv * w + b, mask=d < D)
    tl.store(mean_ptr + row, mean)
    tl.store(inv_ptr + row, inv)


@triton.jit
def _backward_kernel(x_ptr, w_ptr, g_ptr, mean_ptr, inv_ptr, dx_ptr, dw_ptr, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    inv = tl.load(inv_ptr + row)
    normal = (tl.load(x_ptr + row * D + d, mask=inside, other=0.0) - tl.load(mean_ptr + row)) * inv
    g = tl.load(g_ptr + row * D + d, mask=inside, other=0.0)
    grad = g * tl.load(w_ptr + d, mask=inside, other=0.0)
    along = tl.sum(tl.where(inside, grad * normal, 0.0), 0) / D
    dx = inv * (grad - tl.sum(grad, 0) / D - normal * along)
    tl.store(dx_ptr + row * D + d, dx, mask=inside)
    tl.store(dw_ptr + row * D + d, g * normal, mask=inside)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
        rows, D = x.shape
        y, mean, inv = torch.empty_like(x), x.new_empty(rows), x.new_empty(rows)
        _forward_kernel[(rows,)](x, w, b, y, mean, inv, D, eps, BLOCK=triton.next_power_of_2(D))
        ctx.save_for_backward(x, w, mean, inv)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x, w, mean, inv = ctx.saved_tensors
        rows, D = x.shape
        grad_y = grad_y.contiguous()
        dx, dw = torch.empty_like(x), torch.empty_like(x)
        _backward_kernel[(rows,)](x, w, grad_y, mean, inv, dx, dw, D, BLOCK=triton.next_power_of_2(D))
        return dx, dw.sum(0), grad_y.sum(0), None


candidate = LayerNorm.apply
