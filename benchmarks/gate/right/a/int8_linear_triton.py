"""Right: Triton reads 8-bit weights and scales the float32 sums."""

import triton
import triton.language as tl

PROBLEM = "a_int8_linear"
STATUS = "accepted"


@triton.jit
def _int8_kernel(x_ptr, w_ptr, scale_ptr, y_ptr, K, N, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    t, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + t * K + k, mask=k < K, other=0.0)
        inside = (k < K)[:, None] & (n < N)
        w = tl.load(w_ptr + k[:, None] * N + n, mask=inside, other=0).to(tl.float32)
        sums += tl.sum(tl.where(inside, x[:, None] * w, 0.0), 0)
    tl.store(y_ptr + t * N + n, sums * tl.load(scale_ptr + n, mask=n < N, other=0.0), mask=n < N)


def candidate(x, w, scale):
    x, w, scale = x.contiguous(), w.contiguous(), scale.contiguous()
    (T, K), N = x.shape, w.shape[1]
    y = x.new_empty(T, N)
    _int8_kernel[(T,)](x, w, scale, y, K, N, BLOCK_K=16, BLOCK_N=triton.next_power_of_2(N))
    return y
