"""CDF 9/7 wavelet of rows by lifting, `levels` times on the low half, as in JPEG 2000: [low | details, finest last].

A step adds to every odd sample a multiple of its two even neighbours, or to every even one of its odd neighbours; at
the ends the one neighbour counts twice (symmetric extension). Lengths are any; an odd length has one more even sample.
Numpy loops as C++ code has them, in place on an own buffer, float32. The backward runs the steps' transposes backwards.
"""

from __future__ import annotations

import numpy as np
import torch

from goldsmith import assay

LIFTS = (-1.586134342, -0.052980118, 0.882911076, 0.443506852)
SCALE = 1.230174105


@assay.case(B=[2], N=[24], levels=[2])
def rows(make, B, N, levels):
    return {"x": make.normal(B, N), "levels": levels}


@assay.case(B=[3], N=[21], levels=[3])
def odd(make, B, N, levels):
    return rows[0].draw(make, B, N, levels)


def golden(x, levels):
    details = []
    for _ in range(levels):
        even, odd = x[:, 0::2], x[:, 1::2]
        E, D = even.shape[1], odd.shape[1]
        for step, lift in enumerate(LIFTS):
            if step % 2 == 0:  # the even neighbours of odd sample i are i and i + 1
                right = torch.arange(1, D + 1, device=x.device).clamp(max=E - 1)
                odd = odd + lift * (even[:, :D] + even[:, right])
            else:  # the odd neighbours of even sample i are i - 1 and i
                at = torch.arange(E, device=x.device)
                even = even + lift * (odd[:, (at - 1).clamp(min=0)] + odd[:, at.clamp(max=D - 1)])
        details.append(odd * SCALE)
        x = even / SCALE
    return torch.cat([x, *details[::-1]], 1)


def neighbours(i, n):
    """The samples on both sides of sample i of n, mirrored at the ends."""
    left = i - 1 if i > 0 else i + 1
    right = i + 1 if i + 1 < n else i - 1
    return left, right


def lift_row(row, n):
    """One level on the first n samples of a row."""
    for step, lift in enumerate(LIFTS):
        for i in range(1 - step % 2, n, 2):
            left, right = neighbours(i, n)
            row[i] += np.float32(lift) * (row[left] + row[right])
    half = (n + 1) // 2
    packed = np.empty(n, row.dtype)
    for i in range(n):
        if i % 2 == 0:
            packed[i // 2] = row[i] / np.float32(SCALE)
        else:
            packed[half + i // 2] = row[i] * np.float32(SCALE)
    row[:n] = packed


def lift_row_transposed(grad, n):
    """The transpose of lift_row, in place on the gradient of its results."""
    half = (n + 1) // 2
    spread = np.empty(n, grad.dtype)
    for i in range(n):
        if i % 2 == 0:
            spread[i] = grad[i // 2] / np.float32(SCALE)
        else:
            spread[i] = grad[half + i // 2] * np.float32(SCALE)
    for step in reversed(range(len(LIFTS))):
        for i in range(1 - step % 2, n, 2):
            left, right = neighbours(i, n)
            share = np.float32(LIFTS[step]) * spread[i]
            spread[left] += share
            spread[right] += share
    grad[:n] = spread


def lengths(N, levels):
    """Samples that each level works on."""
    out = [N]
    for _ in range(levels - 1):
        out.append((out[-1] + 1) // 2)
    return out


class Wavelet(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, levels):
        y = x.detach().contiguous().clone().numpy()
        for n in lengths(x.shape[1], levels):
            for row in y:
                lift_row(row, n)
        ctx.levels = levels
        return torch.from_numpy(y)

    @staticmethod
    def backward(ctx, g):
        dx = g.contiguous().clone().numpy()
        for n in reversed(lengths(g.shape[1], ctx.levels)):
            for row in dx:
                lift_row_transposed(row, n)
        return torch.from_numpy(dx), None


def kernel(x, levels):
    return Wavelet.apply(x, levels)


def target():
    return assay.Target(kernel, golden, cases=[rows, odd], name="lifting_wavelet", outputs=("y",))
