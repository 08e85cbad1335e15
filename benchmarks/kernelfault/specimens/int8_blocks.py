"""y[m, n] = sum_k a_scale[m, k'] b_scale[n', k'] a[m, k] b[n, k] on int8 codes; k' = k / B, n' = n / B.

As products in 8 bits do it: activations have a scale for each row and block of K, weights one for each block
of N and K.
"""

from __future__ import annotations

import torch

from goldsmith import assay

B = 16


@assay.case(M=[5], N=[40], K=[72])
def codes(make, M, N, K):
    blocks = -(-K // B)
    return {
        "a": make.integers(-127, 128, M, K).to(torch.int8), "b": make.integers(-127, 128, N, K).to(torch.int8),
        "a_scale": make.uniform(M, blocks) + 0.1, "b_scale": make.uniform(-(-N // B), blocks) + 0.1,
    }  # fmt: skip


@assay.case(M=[9], N=[50], K=[60])
def square(make, M, N, K):
    """As many blocks of N as of K."""
    return codes[0].draw(make, M, N, K)


def golden(a, b, a_scale, b_scale):
    N, K = b.shape
    left = a.to(a_scale.dtype) * a_scale.repeat_interleave(B, 1)[:, :K]
    right = b.to(a_scale.dtype) * b_scale.repeat_interleave(B, 0)[:N].repeat_interleave(B, 1)[:, :K]
    return left @ right.mT


def kernel(a, b, a_scale, b_scale):
    (M, K), N = a.shape, len(b)
    y = torch.empty(M, N)
    for n in range(0, N, B):
        wide = slice(n, min(n + B, N))
        acc = torch.zeros(M, wide.stop - n)
        for k in range(0, K, B):
            deep = slice(k, min(k + B, K))
            dots = a[:, deep].int() @ b[wide, deep].int().mT
            acc += dots.float() * a_scale[:, k // B, None] * b_scale[n // B, k // B]
        y[:, wide] = acc
    return y


def target():
    return assay.Target(kernel, golden, cases=[codes, square], name="int8_blocks", backward=None)
