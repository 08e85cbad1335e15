"""y = x W^T, W[n, k] = e2m1(code[n, k]) 2^(scale[n, k // 8] - 127): a product with weights in MXFP4, blocks of 8.

A byte holds two codes, the even column in its low half, and a begun block has a scale of its own. x and y may be
bfloat16, sums are float32. A thread (a stand-in for an asynchronous copy) decodes the next block of columns into one
of two buffers while the present one is multiplied; the backward decodes again.
"""

from __future__ import annotations

import threading
import time

import torch

from goldsmith import assay

BLOCK, BIAS = 8, 127
DELAY = 0.0005  # seconds that a decoding takes at least
VALUES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@assay.case(T=[5], N=[9], K=[20])
def tokens(make, T, N, K):
    return {
        "x": make.normal(T, K), "codes": make.integers(0, 256, N, K // 2).to(torch.uint8),
        "scales": make.integers(124, 130, N, -(-K // BLOCK)).to(torch.uint8),
    }  # fmt: skip


@assay.case(T=[3], N=[7], K=[30])
def narrow(make, T, N, K):
    return tokens[0].draw(make, T, N, K)


@assay.case(T=[1], N=[12], K=[16])
def single(make, T, N, K):
    return tokens[0].draw(make, T, N, K)


def golden(x, codes, scales):
    code = torch.stack([codes & 15, codes >> 4], 2).flatten(1).long()
    factor = torch.exp2(scales.to(x.dtype) - BIAS).repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    w = assay.stage("w", VALUES.to(x.dtype)[code] * factor)
    return x @ w.mT


def decode(codes, scales, step, out):
    """Columns step BLOCK to (step + 1) BLOCK of the weight, as many as there are, into out; returns how many."""
    N, half = codes.shape
    blocks = -(-2 * half // BLOCK)
    packed = codes[:, step * BLOCK // 2 : (step + 1) * BLOCK // 2]
    width = 2 * packed.shape[1]
    factor = torch.exp2(scales.reshape(-1)[torch.arange(N) * blocks + step].float() - BIAS).unsqueeze(1)
    out[:, 0:width:2] = VALUES[(packed & 15).long()] * factor
    out[:, 1:width:2] = VALUES[(packed >> 4).long()] * factor
    return width


class Ahead:
    """A decoding under way."""

    def __init__(self, codes, scales, step, out):
        def work():
            time.sleep(DELAY)
            decode(codes, scales, step, out)

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def wait(self):
        self.thread.join()


class MXFP4(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes, scales):
        (T, K), N = x.shape, len(codes)
        steps = -(-K // BLOCK)
        buffers = [torch.empty(N, BLOCK), torch.empty(N, BLOCK)]
        acc = torch.zeros(T, N)
        ahead = Ahead(codes, scales, 0, buffers[0])
        for step in range(steps):
            ahead.wait()
            if step + 1 < steps:
                ahead = Ahead(codes, scales, step + 1, buffers[(step + 1) % 2])
            part = x[:, step * BLOCK : (step + 1) * BLOCK].float()
            acc += part @ buffers[step % 2][:, : part.shape[1]].mT
        ctx.save_for_backward(codes, scales)
        return acc.to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        codes, scales = ctx.saved_tensors
        T, N, K = len(g), len(codes), 2 * codes.shape[1]
        dx, tile = torch.empty(T, K, dtype=g.dtype), torch.empty(N, BLOCK)
        for step in range(-(-K // BLOCK)):
            width = decode(codes, scales, step, tile)
            dx[:, step * BLOCK : step * BLOCK + width] = (g.float() @ tile[:, :width]).to(g.dtype)
        return dx, None, None


def kernel(x, codes, scales):
    return MXFP4.apply(x, codes, scales)


def target():
    return assay.Target(
        kernel, golden, cases=[tokens, narrow, single], name="mxfp4_matmul", outputs=("y",), dtypes=(torch.bfloat16,)
    )  # fmt: skip
