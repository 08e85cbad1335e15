"""A Triton kernel with a mistake that tests at powers of two do not see: the README's picture diagnoses it."""

import torch
import triton
import triton.language as tl

from goldsmith import assay


@triton.jit
def kernel(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row, d = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * D + d, d < D, 0.0)
    e = tl.exp(x - tl.max(x))
    tl.store(y_ptr + row * D + d, e / tl.sum(e), d < D)


def softmax(x):
    y = torch.empty_like(x)
    kernel[(len(x),)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


target = assay.Target(softmax, lambda x: x.softmax(-1), cases={"x": torch.randn(4, 100)}, backward=None)
