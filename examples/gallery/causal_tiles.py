"""The lower triangle of c b^T, in tiles, in Triton. A second loop fills the rest of the rows with zeros. It counts
columns from the last row of its block, where the pointer is already farther if tiles are wider than high.

After https://github.com/state-spaces/mamba/pull/537 (Hprairie, 2024).
"""

import triton
import triton.language as tl

from goldsmith import assay


# T tokens, D dim
@triton.jit
def _triangle(c_ptr, b_ptr, y_ptr, T, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    d = tl.arange(0, D)
    c = tl.load(c_ptr + m * D + d[None, :], m < T, 0.0)
    end = (tl.program_id(0) + 1) * BLOCK_M
    y_ptrs = y_ptr + m * T + n
    for start in range(0, end, BLOCK_N):
        b = tl.load(b_ptr + (start + n) * D + d[:, None], start + n < T, 0.0)
        y = tl.where(start + n <= m, tl.sum(c[:, :, None] * b[None, :, :], 1), 0.0)
        tl.store(y_ptrs, y, (m < T) & (start + n < T))
        y_ptrs += BLOCK_N
    for start in range(end, T, BLOCK_N):
        tl.store(y_ptrs, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), (m < T) & (start + n < T))
        y_ptrs += BLOCK_N


def triangle(c, b):
    T, D = c.shape
    y = c.new_empty(T, T)
    _triangle[(triton.cdiv(T, 4),)](c.contiguous(), b.contiguous(), y, T, D=D, BLOCK_M=4, BLOCK_N=8)
    return y


def golden(c, b):
    return (c @ b.mT).tril()


@assay.case(T=[8, 18], D=[4])
def tokens(make, T, D):
    return {"c": make.normal(T, D), "b": make.normal(T, D)}


target = assay.Target(triangle, golden, cases=tokens, backward=None, name="causal_tiles")
