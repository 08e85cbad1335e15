"""RMSNorm as Gemma has it, with weights that count from 1, in Triton. The kernels take the weights as they are.

After https://github.com/linkedin/Liger-Kernel/issues/74 (yundai424, 2024).
"""

import torch
import triton
import triton.language as tl

from goldsmith import assay


# T tokens, D dim
@triton.jit
def _forward(x_ptr, w_ptr, y_ptr, inv_rms_ptr, D, eps, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * D + d, d < D, 0.0)
    w = tl.load(w_ptr + d, d < D, 0.0)
    inv_rms = 1 / tl.sqrt(tl.sum(x * x) / D + eps)
    tl.store(inv_rms_ptr + row, inv_rms)
    tl.store(y_ptr + row * D + d, x * inv_rms * w, d < D)


@triton.jit
def _backward(x_ptr, w_ptr, inv_rms_ptr, dy_ptr, dx_ptr, D, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * D + d, d < D, 0.0)
    w = tl.load(w_ptr + d, d < D, 0.0)
    dy = tl.load(dy_ptr + row * D + d, d < D, 0.0)
    inv_rms = tl.load(inv_rms_ptr + row)
    x_hat = x * inv_rms
    dx_hat = dy * w
    tl.store(dx_ptr + row * D + d, inv_rms * (dx_hat - x_hat * tl.sum(dx_hat * x_hat) / D), d < D)


class GemmaNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        x, w = x.contiguous(), w.contiguous()
        T, D = x.shape
        y, inv_rms = torch.empty_like(x), x.new_empty(T)
        _forward[(T,)](x, w, y, inv_rms, D, eps, BLOCK=triton.next_power_of_2(D))
        ctx.save_for_backward(x, w, inv_rms)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, inv_rms = ctx.saved_tensors
        T, D = x.shape
        dy, dx = dy.contiguous(), torch.empty_like(x)
        _backward[(T,)](x, w, inv_rms, dy, dx, D, BLOCK=triton.next_power_of_2(D))
        return dx, (dy * x * inv_rms[:, None]).sum(0), None


def golden(x, w, eps):
    inv_rms = assay.stage("inv_rms", torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    return x * inv_rms * (1 + w)


@assay.case(T=[3], D=[8, 12])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "eps": 1e-6}


target = assay.Target(GemmaNorm.apply, golden, cases=tokens, name="gemma_norm")
