"""RMSNorm whose backward sums the weight's gradient in blocks of rows, in Triton. The buffer of these sums has a row
for each full block, and the grid has one more.

After https://github.com/BobMcDear/attorch/issues/18 (truong-v, 2026).
"""

import torch
import triton
import triton.language as tl

from goldsmith import assay

ROWS = 4


# T tokens, D dim
@triton.jit
def _backward(x_ptr, w_ptr, inv_rms_ptr, dy_ptr, dx_ptr, dw_ptr, T, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    t = block * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    inside = (t < T) & (d < D)
    x = tl.load(x_ptr + t * D + d, inside, 0.0)
    dy = tl.load(dy_ptr + t * D + d, inside, 0.0)
    w = tl.load(w_ptr + d, d < D, 0.0)
    x_hat = x * tl.load(inv_rms_ptr + t, t < T, 0.0)
    dx_hat = dy * w
    mean = tl.sum(dx_hat * x_hat, 1) / D
    dx = tl.load(inv_rms_ptr + t, t < T, 0.0) * (dx_hat - x_hat * mean[:, None])
    tl.store(dx_ptr + t * D + d, dx, inside)
    tl.store(dw_ptr + block * D + d, tl.sum(dy * x_hat, 0)[None, :], d < D)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        inv_rms = torch.rsqrt(x.square().mean(-1) + eps)
        ctx.save_for_backward(x, w, inv_rms)
        return x * inv_rms[:, None] * w

    @staticmethod
    def backward(ctx, dy):
        x, w, inv_rms = ctx.saved_tensors
        T, D = x.shape
        x, w, dy = x.contiguous(), w.contiguous(), dy.contiguous()
        dx, dw = torch.empty_like(x), x.new_empty(T // ROWS, D)
        grid = (triton.cdiv(T, ROWS),)
        _backward[grid](x, w, inv_rms, dy, dx, dw, T, D, ROWS=ROWS, BLOCK=triton.next_power_of_2(D))
        return dx, dw.sum(0), None


def golden(x, w, eps):
    inv_rms = assay.stage("inv_rms", torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    return x * inv_rms * w


@assay.case(T=[8, 10], D=[6])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "eps": 1e-6}


target = assay.Target(RMSNorm.apply, golden, cases=tokens, name="weight_grad_rows")
