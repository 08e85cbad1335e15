"""Right: one Triton program a row adds blocks of 1024 positive values."""

import torch
import triton
import triton.language as tl

PROBLEM = "a_kb_relu_mean"
STATUS = "accepted"


@triton.jit
def _relu_mean_kernel(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0)
        sums += tl.where(x < 0, 0.0, x)
    tl.store(y_ptr + row, tl.sum(sums, 0) / D)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        x = x.contiguous()
        y = x.new_empty(len(x))
        _relu_mean_kernel[(len(x),)](x, y, x.shape[1], BLOCK=1024)
        return y
