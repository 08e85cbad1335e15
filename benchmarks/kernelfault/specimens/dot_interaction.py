"""y = x[0] and the products of all pairs of features, x[i] x[j] with j < i, in one row: DLRM's dot interaction.

In Triton, float32: a program takes a sample, its pairs row by row at i (i - 1) / 2 + j behind the dense feature. The
backward builds the symmetric matrix of the pairs' gradients and multiplies it with blocks of the features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK = 4


@assay.case(B=[3], F=[5], D=[6])
def samples(make, B, F, D):
    return {"x": make.normal(B, F, D)}


@assay.case(B=[2], F=[24], D=[3])
def many_features(make, B, F, D):
    return samples[0].draw(make, B, F, D)


@assay.case(B=[4], F=[3], D=[9])
def wide(make, B, F, D):
    return samples[0].draw(make, B, F, D)


def golden(x):
    z = assay.stage("z", x @ x.mT)
    i, j = torch.tril_indices(x.shape[1], x.shape[1], -1)
    return torch.cat([x[:, 0], z[:, i, j]], 1)


@triton.jit
def _forward(x_ptr, y_ptr, F, D, WIDTH, ALL: tl.constexpr, BLOCK: tl.constexpr):
    b, f = tl.program_id(0), tl.arange(0, ALL)
    z = tl.zeros([ALL, ALL], tl.float32)
    for d0 in range(0, D, BLOCK):
        d = d0 + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + (b * F + f[:, None]) * D + d[None, :], mask=(f < F)[:, None] & (d < D)[None, :], other=0.0)
        z += tl.sum(x[:, None, :] * x[None, :, :], 2)
        tl.store(y_ptr + b * WIDTH + d[None, :] + f[:, None] * 0, x, mask=(f == 0)[:, None] & (d < D)[None, :])
    i, j = f[:, None], f[None, :]
    place = i * (i - 1) // 2 + j
    tl.store(y_ptr + b * WIDTH + D + place, z, mask=(j < i) & (i < F))


@triton.jit
def _backward(x_ptr, g_ptr, dx_ptr, F, D, WIDTH, ALL: tl.constexpr, BLOCK: tl.constexpr):
    b, f = tl.program_id(0), tl.arange(0, ALL)
    i, j = f[:, None], f[None, :]
    high, low = tl.maximum(i, j), tl.minimum(i, j)
    pair = (low < high) & (high < F)
    dz = tl.load(g_ptr + b * WIDTH + D + high * (high - 1) // 2 + low, mask=pair, other=0.0)
    for d0 in range(0, D, BLOCK):
        d = d0 + tl.arange(0, BLOCK)
        inside = (f < F)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + (b * F + f[:, None]) * D + d[None, :], mask=inside, other=0.0)
        dx = tl.sum(dz[:, :, None] * x[None, :, :], 1)
        dense = tl.load(g_ptr + b * WIDTH + d, mask=d < D, other=0.0)
        dx += tl.where((f == 0)[:, None], dense[None, :], 0.0)
        tl.store(dx_ptr + (b * F + f[:, None]) * D + d[None, :], dx, mask=inside)


class Interaction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        B, F, D = x.shape
        width = D + F * (F - 1) // 2
        y = x.new_empty(B, width)
        _forward[(B,)](x, y, F, D, width, triton.next_power_of_2(F), BLOCK)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        g = g.contiguous()
        B, F, D = x.shape
        dx = torch.empty_like(x)
        _backward[(B,)](x, g, dx, F, D, g.shape[1], triton.next_power_of_2(F), BLOCK)
        return dx


def kernel(x):
    return Interaction.apply(x)


def target():
    return assay.Target(kernel, golden, cases=[samples, many_features, wide], name="dot_interaction", outputs=("y",))
