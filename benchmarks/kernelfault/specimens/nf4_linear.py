"""y = x W^T + b, W = NF4[code] absmax[block]: a linear layer of QLoRA with its scales quantised once more.

The weight is one flat row of codes, two a byte, the first in the high half. A block of 8 has an absmax, and blocks go
on over the ends of rows; absmax = code / 127 scale[group] + offset in signed bytes, 4 blocks a group. Rows of W are
decoded in tiles, forward and backward; what absmax was decoded to is kept as long as its parts are the same.
"""

from __future__ import annotations

import torch

from goldsmith import assay

BLOCK, GROUP, ROWS = 8, 4, 4
NF4 = torch.tensor([
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626,
    0.7230, 1.0,
])  # fmt: skip
KEPT: dict[str, tuple] = {}


@assay.case(T=[5], N=[7], K=[10])
def tokens(make, T, N, K):
    blocks = -(-N * K // BLOCK)
    return {
        "x": make.normal(T, K), "codes": make.integers(0, 256, -(-N * K // 2)).to(torch.uint8),
        "absmax_codes": make.integers(-127, 128, blocks).to(torch.int8),
        "scales": 0.1 + make.uniform(-(-blocks // GROUP)), "offset": 1.5, "bias": make.normal(N),
    }  # fmt: skip


@assay.case(T=[3], N=[10], K=[13])
def odd(make, T, N, K):
    return {**tokens[0].draw(make, T, N, K), "offset": 1.25}


@assay.case(T=[2], N=[5], K=[22])
def long_rows(make, T, N, K):
    return tokens[0].draw(make, T, N, K)


def golden(x, codes, absmax_codes, scales, offset, bias):
    K, N = x.shape[1], len(bias)
    absmax = absmax_codes.to(x.dtype) / 127 * scales.repeat_interleave(GROUP)[: len(absmax_codes)] + offset
    absmax = assay.stage("absmax", absmax)
    code = torch.stack([codes >> 4, codes & 15], 1).flatten()[: N * K].long()
    w = assay.stage("w", (NF4.to(x.dtype)[code] * absmax.repeat_interleave(BLOCK)[: N * K]).reshape(N, K))
    return x @ w.mT + bias


def absmax_of(codes, scales, offset):
    """The blocks' scales, decoded again only when one of their parts has changed."""
    state = (codes.clone(), scales.clone(), offset)
    if "state" in KEPT and same(KEPT["state"], state):
        return KEPT["absmax"][0]
    blocks = torch.arange(len(codes))
    absmax = codes.float() * (1 / 127) * scales[blocks // GROUP] + offset
    KEPT["state"], KEPT["absmax"] = state, (absmax,)
    return absmax


def same(a, b):
    return a[0].shape == b[0].shape and torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2] == b[2]


def decode(codes, absmax, row, rows, K):
    """Rows row to row + rows of the weight."""
    at = torch.arange(row, row + rows).unsqueeze(1) * K + torch.arange(K)
    byte = codes[at // 2]
    code = torch.where(at % 2 == 0, byte >> 4, byte & 15)
    return NF4[code.long()] * absmax[at // BLOCK]


class NF4Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes, absmax_codes, scales, offset, bias):
        (T, K), N = x.shape, len(bias)
        absmax = assay.stage("absmax", absmax_of(absmax_codes, scales, offset))
        y = torch.empty(T, N)
        for row in range(0, N, ROWS):
            w = decode(codes, absmax, row, min(ROWS, N - row), K)
            y[:, row : row + ROWS] = x @ w.mT + bias[row : row + ROWS]
        ctx.save_for_backward(codes, absmax_codes, scales)
        ctx.sizes = N, K, offset
        return y

    @staticmethod
    def backward(ctx, g):
        codes, absmax_codes, scales = ctx.saved_tensors
        N, K, offset = ctx.sizes
        absmax = absmax_of(absmax_codes, scales, offset)
        dx = torch.zeros(len(g), K)
        for row in range(0, N, ROWS):
            w = decode(codes, absmax, row, min(ROWS, N - row), K)
            dx += g[:, row : row + ROWS] @ w
        return dx, None, None, None, None, g.sum(0)


def kernel(x, codes, absmax_codes, scales, offset, bias):
    return NF4Linear.apply(x, codes, absmax_codes, scales, offset, bias)


def target():
    return assay.Target(
        kernel, golden, cases=[tokens, odd, long_rows], name="nf4_linear", outputs=("y",), grads=("x", "bias")
    )  # fmt: skip
