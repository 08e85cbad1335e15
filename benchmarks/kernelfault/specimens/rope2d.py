"""Rotary positions of image patches in Triton: the first half of a head turns with the row, the second with the column.

Each half is Q pairs (i, i + Q) as in GPT-NeoX, with cosines and sines from a table by positions. The backward is the
same kernel with the sines negative; strides of tokens, heads and features are passed on as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

HEADS = 2


@assay.case(N=[7], H=[3], Q=[3], P=[16])
def patches(make, N, H, Q, P):
    angle = make.uniform(P, Q) * 6.28
    return {
        "x": make.normal(N, H, 4 * Q), "cos": angle.cos(), "sin": angle.sin(), "row": make.integers(0, P, N),
        "column": make.integers(0, P, N),
    }  # fmt: skip


@assay.case(N=[5], H=[4], Q=[2], P=[30])
def small(make, N, H, Q, P):
    return patches[0].draw(make, N, H, Q, P)


def golden(x, cos, sin, row, column):
    Q = cos.shape[1]
    out = []
    for half, position in ((x[..., : 2 * Q], row), (x[..., 2 * Q :], column)):
        a, b = half[..., :Q], half[..., Q:]
        c, s = cos[position].unsqueeze(1), sin[position].unsqueeze(1)
        out += [a * c - b * s, b * c + a * s]
    return torch.cat(out, -1)


@triton.jit
def _turn(
    x_ptr, cos_ptr, sin_ptr, row_ptr, column_ptr, y_ptr, stride_n, stride_h, stride_d, H, Q, sign,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, half = tl.program_id(0), tl.program_id(1)
    h = tl.program_id(2) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    inside = (h < H) & (i < Q)
    position = tl.where(half == 0, tl.load(row_ptr + n), tl.load(column_ptr + n))
    c = tl.load(cos_ptr + position * Q + i, mask=i < Q, other=0.0)
    s = tl.load(sin_ptr + position * Q + i, mask=i < Q, other=0.0) * sign
    first = half * 2 * Q + i
    second = first + Q
    a = tl.load(x_ptr + n * stride_n + h * stride_h + first * stride_d, mask=inside, other=0.0)
    b = tl.load(x_ptr + n * stride_n + h * stride_h + second * stride_d, mask=inside, other=0.0)
    out = y_ptr + (n * H + h) * 4 * Q
    tl.store(out + first, a * c - b * s, mask=inside)
    tl.store(out + second, b * c + a * s, mask=inside)


def turn(x, cos, sin, row, column, sign):
    N, H, D = x.shape
    Q = D // 4
    y = torch.empty(N, H, D, device=x.device)
    grid = (N, 2, triton.cdiv(H, HEADS))
    _turn[grid](
        x, cos.contiguous(), sin.contiguous(), row.contiguous(), column.contiguous(), y, *x.stride(), H, Q, sign,
        HEADS, triton.next_power_of_2(Q),
    )  # fmt: skip
    return y


def forward(x, cos, sin, row, column):
    return turn(x, cos, sin, row, column, 1.0)


def backward(x, cos, sin, row, column, grad_y):
    return {"x": turn(grad_y, cos, sin, row, column, -1.0)}


def target():
    return assay.Target(
        forward, golden, cases=[patches, small], name="rope2d", outputs=("y",), backward=backward, grads=("x",)
    )  # fmt: skip
