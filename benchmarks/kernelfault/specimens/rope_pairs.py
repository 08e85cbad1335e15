"""y[.., 2i] = x[2i] cos - x[2i+1] sin, y[.., 2i+1] = x[2i+1] cos + x[2i] sin for the first R features.

Rotary positions on interleaved pairs of a part of each head, from a table at given positions. The rest is copied.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(T=[7], H=[2], D=[10], R=[6], P=[24])
def tokens(make, T, H, D, R, P):
    angle = make.uniform(P, R // 2) * 6.28
    return {
        "x": make.normal(T, H, D), "cos": angle.cos(), "sin": angle.sin(), "position": make.integers(0, P, T),
    }  # fmt: skip


@assay.case(T=[5], H=[3], D=[8], R=[4], P=[40])
def few(make, T, H, D, R, P):
    return tokens[0].draw(make, T, H, D, R, P)


def golden(x, cos, sin, position):
    R = 2 * cos.shape[1]
    turn = torch.complex(cos[position], sin[position]).unsqueeze(1)
    pairs = torch.view_as_complex(x[..., :R].unflatten(-1, (-1, 2)).contiguous())
    return torch.cat((torch.view_as_real(pairs * turn).flatten(-2), x[..., R:]), -1)


def forward(x, cos, sin, position):
    R = 2 * cos.shape[1]
    y = torch.empty(x.shape)
    c, s = cos[position].unsqueeze(1), sin[position].unsqueeze(1)
    even, odd = x[..., 0:R:2], x[..., 1:R:2]
    y[..., 0:R:2] = even * c - odd * s
    y[..., 1:R:2] = odd * c + even * s
    y[..., R:] = x[..., R:]
    return y


def backward(x, cos, sin, position, grad_y):
    R = 2 * cos.shape[1]
    c, s = cos[position, None], sin[position, None]
    g_even, g_odd = grad_y[..., 0:R:2], grad_y[..., 1:R:2]
    dx = grad_y.clone()
    dx[..., 0:R:2] = g_even * c + g_odd * s
    dx[..., 1:R:2] = g_odd * c - g_even * s
    return {"x": dx}


def target():
    return assay.Target(forward, golden, cases=[tokens, few], name="rope_pairs", backward=backward, grads=("x",))
