"""Right: one Triton program for a block of columns walks through time; a second one walks back."""

import torch
import triton
import triton.language as tl

PROBLEM = "a_decay_scan"
STATUS = "accepted"


@triton.jit
def _scan_kernel(x_ptr, decay_ptr, h_ptr, T, D, BLOCK: tl.constexpr):
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.zeros((BLOCK,), dtype=tl.float32)
    for t in range(0, T):
        decay = tl.load(decay_ptr + t * D + d, mask=d < D, other=0.0)
        h = decay * h + tl.load(x_ptr + t * D + d, mask=d < D, other=0.0)
        tl.store(h_ptr + t * D + d, h, mask=d < D)


@triton.jit
def _back_kernel(grad_ptr, decay_ptr, h_ptr, dx_ptr, d_decay_ptr, T, D, BLOCK: tl.constexpr):
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dh = tl.zeros((BLOCK,), dtype=tl.float32)
    for back in range(0, T):
        t = T - 1 - back
        dh += tl.load(grad_ptr + t * D + d, mask=d < D, other=0.0)
        before = tl.load(h_ptr + (t - 1) * D + d, mask=(d < D) & (t > 0), other=0.0)
        tl.store(dx_ptr + t * D + d, dh, mask=d < D)
        tl.store(d_decay_ptr + t * D + d, dh * before, mask=d < D)
        dh *= tl.load(decay_ptr + t * D + d, mask=d < D, other=0.0)


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, decay):
        x, decay = x.contiguous(), decay.contiguous()
        T, D = x.shape
        h = torch.empty_like(x)
        _scan_kernel[(triton.cdiv(D, 4),)](x, decay, h, T, D, BLOCK=4)
        ctx.save_for_backward(decay, h)
        return h

    @staticmethod
    def backward(ctx, grad_h):
        decay, h = ctx.saved_tensors
        T, D = h.shape
        dx, d_decay = torch.empty_like(h), torch.empty_like(h)
        _back_kernel[(triton.cdiv(D, 4),)](grad_h.contiguous(), decay, h, dx, d_decay, T, D, BLOCK=4)
        return dx, d_decay


candidate = Scan.apply
