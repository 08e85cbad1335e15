"""Right: a Triton kernel sums blocks of 256, and a second one adds the partial sums of each row."""

import torch
import triton
import triton.language as tl

PROBLEM = "a_row_mean"
STATUS = "accepted"


@triton.jit
def _partial_kernel(x_ptr, part_ptr, D, parts, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0)
    tl.store(part_ptr + row * parts + part, tl.sum(x, 0))


@triton.jit
def _mean_kernel(part_ptr, y_ptr, D, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    part = tl.load(part_ptr + row * parts + n, mask=n < parts, other=0.0)
    tl.store(y_ptr + row, tl.sum(part, 0) / D)


def candidate(x):
    x = x.contiguous()
    T, D = x.shape
    parts = triton.cdiv(D, 256)
    space, y = torch.empty(T, parts, device=x.device), torch.empty(T, device=x.device)
    _partial_kernel[(T, parts)](x, space, D, parts, BLOCK=256)
    _mean_kernel[(T,)](space, y, D, parts, BLOCK=triton.next_power_of_2(parts))
    return y
