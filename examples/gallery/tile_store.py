"""A linear layer with a squared ReLU, in tiles, in Triton. The store of a tile ignores the mask that stands above it.

After https://github.com/Dao-AILab/flash-attention/issues/2789 (truong-v, 2026).
"""

import triton
import triton.language as tl

from goldsmith import assay


# M rows, N columns, K summed
@triton.jit
def _linear(x_ptr, w_ptr, y_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + m * K + k[None, :], (m < M) & (k[None, :] < K), 0.0)
        w = tl.load(w_ptr + n * K + k[:, None], (n < N) & (k[:, None] < K), 0.0)
        acc += tl.dot(x, w, input_precision="ieee")
    relu = tl.maximum(acc, 0.0)
    mask = (m < M) & (n < N)  # noqa: F841
    tl.store(y_ptr + m * N + n, relu * relu)


def linear(x, w):
    (M, K), N = x.shape, len(w)
    y = x.new_empty(M, N)
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 16))
    _linear[grid](x.contiguous(), w.contiguous(), y, M, N, K, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)
    return y


def golden(x, w):
    return assay.stage("z", x @ w.mT).relu().square()


@assay.case(M=[16, 21], N=[32, 37], K=[8])
def tiles(make, M, N, K):
    return {"x": make.normal(M, K), "w": make.normal(N, K)}


target = assay.Target(linear, golden, cases=tiles, backward=None, name="tile_store")
