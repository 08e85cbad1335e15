"""Right: one Triton program a row; the block is the next power of two and is chosen once for each size."""

import torch
import triton
import triton.language as tl

PROBLEM = "a_logsumexp"
STATUS = "accepted"


_BLOCKS = {}


@triton.jit
def _lse_kernel(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * D + d, mask=d < D, other=-float("inf"))
    top = tl.max(x, 0)
    tl.store(y_ptr + row, top + tl.log(tl.sum(tl.exp(x - top), 0)))


class LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        rows, D = x.shape
        x, y = x.contiguous(), x.new_empty(rows)
        block = _BLOCKS.setdefault(D, triton.next_power_of_2(D))
        _lse_kernel[(rows,)](x, y, D, BLOCK=block)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x, y = ctx.saved_tensors
        return torch.exp(x - y[:, None]) * grad_y[:, None]


candidate = LogSumExp.apply
