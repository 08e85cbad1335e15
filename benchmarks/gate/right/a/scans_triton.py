"""Right: a Triton scan in one block writes both results, each to memory of its own."""

import torch
import triton
import triton.language as tl

PROBLEM = "a_scans"
STATUS = "accepted"


@triton.jit
def _scan_kernel(x_ptr, exclusive_ptr, inclusive_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    sums = tl.cumsum(x, 0)
    tl.store(inclusive_ptr + i, sums, mask=i < n)
    tl.store(exclusive_ptr + i + 1, sums, mask=i < n - 1)
    tl.store(exclusive_ptr + i, tl.zeros_like(x), mask=i == 0)


def candidate(x):
    x = x.contiguous()
    exclusive, inclusive = torch.empty_like(x), torch.empty_like(x)
    _scan_kernel[(1,)](x, exclusive, inclusive, len(x), BLOCK=triton.next_power_of_2(len(x)))
    return exclusive, inclusive
