"""Right: one Triton program a row reads both halves, and the backward writes both halves of one buffer."""

import torch
import triton
import triton.language as tl

PROBLEM = "a_swiglu"
STATUS = "accepted"


@triton.jit
def _swiglu_kernel(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * D + d, mask=d < D)
    up = tl.load(x_ptr + row * 2 * D + D + d, mask=d < D)
    tl.store(y_ptr + row * D + d, gate / (1.0 + tl.exp(-gate)) * up, mask=d < D)


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        rows, D = len(x), x.shape[1] // 2
        y = x.new_empty(rows, D)
        _swiglu_kernel[(rows,)](x, y, D, BLOCK=triton.next_power_of_2(D))
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        s = torch.sigmoid(gate)
        dx = torch.empty_like(ctx.saved_tensors[0])
        D = gate.shape[-1]
        dx[:, :D] = grad_y * up * s * (1 + gate * (1 - s))
        dx[:, D:] = grad_y * gate * s
        return dx


candidate = SwiGLU.apply
