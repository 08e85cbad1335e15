"""y[q] = sum over levels l and points j of p[q, l, j] value_l(loc[q, l, j]): deformable attention at several scales.

Each head of a query looks at some points of every level of a pyramid, between pixels (centres at halves, zeros
outside); p is a softmax over all levels and points. Levels lie one behind another in value. Queries go in tiles, each
corner's pixel is read by a flat index, and gradients of value are added by it.
"""

from __future__ import annotations

import torch

from goldsmith import assay

TILE = 4
DOWN, RIGHT = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])  # the four corners


@assay.case(Q=[5], M=[2], C=[3], P=[2])
def pyramid(make, Q, M, C, P):
    shapes = torch.tensor([[4, 5], [2, 3]])
    L, S = len(shapes), int(shapes.prod(1).sum())
    return {
        "value": make.normal(S, M, C), "shapes": shapes, "loc": 1.3 * make.uniform(Q, M, L, P, 2) - 0.15,
        "logits": make.normal(Q, M, L * P),
    }  # fmt: skip


@assay.case(Q=[4], M=[3], C=[2], P=[3])
def heads(make, Q, M, C, P):
    return pyramid[0].draw(make, Q, M, C, P)


@assay.case(Q=[7], M=[1], C=[5], P=[1])
def single(make, Q, M, C, P):
    return pyramid[0].draw(make, Q, M, C, P)


def golden(value, shapes, loc, logits):
    Q, M, L, P, _ = loc.shape
    p = assay.stage("p", torch.softmax(logits, 2)).view(Q, M, L, P)
    y, start, head = 0.0, 0, torch.arange(M).view(M, 1, 1)
    for level, (H, W) in enumerate(shapes.tolist()):
        x_at, y_at = loc[:, :, level, :, 0] * W - 0.5, loc[:, :, level, :, 1] * H - 0.5
        x_at, y_at = x_at.unsqueeze(3), y_at.unsqueeze(3)
        row, column = y_at.floor().long() + DOWN, x_at.floor().long() + RIGHT
        inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
        pixel = value[start + row.clamp(0, H - 1) * W + column.clamp(0, W - 1), head]
        weight = p[:, :, level].unsqueeze(3) * (1 - (y_at - row).abs()) * (1 - (x_at - column).abs())
        y = y + (weight.unsqueeze(4) * torch.where(inside.unsqueeze(4), pixel, 0.0)).sum((2, 3))
        start += H * W
    return y


def corners(x_at, y_at, H, W, start, M):
    """For each of the four corners [..., 4]: flat index, whether it is inside, weight, its slopes in x and y."""
    left, top = torch.floor(x_at), torch.floor(y_at)
    fx, fy = (x_at - left).unsqueeze(3), (y_at - top).unsqueeze(3)
    row, column = top.long().unsqueeze(3) + DOWN, left.long().unsqueeze(3) + RIGHT
    inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
    pixel = start + row.clamp(0, H - 1) * W + column.clamp(0, W - 1)
    wx, wy = torch.where(RIGHT == 1, fx, 1 - fx), torch.where(DOWN == 1, fy, 1 - fy)
    head = torch.arange(M).view(1, M, 1, 1)
    return pixel * M + head, inside.unsqueeze(4), wx * wy, (2 * RIGHT - 1) * wy, (2 * DOWN - 1) * wx


class Deform(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, shapes, loc, logits):
        Q, M, L, P, _ = loc.shape
        table = value.contiguous().view(-1, value.shape[2])
        p = assay.stage("p", torch.softmax(logits, 2)).view(Q, M, L, P)
        y = torch.empty(Q, M, value.shape[2])
        for q in range(0, Q, TILE):
            rows = slice(q, min(q + TILE, Q))
            acc, start = torch.zeros(y[rows].shape), 0
            for level, (H, W) in enumerate(shapes.tolist()):
                x_at = loc[rows, :, level, :, 0] * W - 0.5
                y_at = loc[rows, :, level, :, 1] * H - 0.5
                at, inside, weight, _, _ = corners(x_at, y_at, H, W, start, M)
                pixel = torch.where(inside, table[at], 0.0)
                acc += ((p[rows, :, level].unsqueeze(3) * weight).unsqueeze(4) * pixel).sum((2, 3))
                start += H * W
            y[rows] = acc
        ctx.save_for_backward(value, shapes, loc, p)
        return y

    @staticmethod
    def backward(ctx, g):
        value, shapes, loc, p = ctx.saved_tensors
        Q, M, L, P, _ = loc.shape
        C = value.shape[2]
        table = value.contiguous().view(-1, C)
        dtable, dloc, dp = torch.zeros(table.shape), torch.empty(loc.shape), torch.empty(p.shape)
        for q in range(0, Q, TILE):
            rows = slice(q, min(q + TILE, Q))
            grad, start = g[rows].unsqueeze(2).unsqueeze(2), 0
            for level, (H, W) in enumerate(shapes.tolist()):
                x_at = loc[rows, :, level, :, 0] * W - 0.5
                y_at = loc[rows, :, level, :, 1] * H - 0.5
                here = p[rows, :, level]
                at, inside, weight, sx, sy = corners(x_at, y_at, H, W, start, M)
                seen = (grad * torch.where(inside, table[at], 0.0)).sum(4)
                dp[rows, :, level] = (seen * weight).sum(3)
                dx, dy = here * (seen * sx).sum(3), here * (seen * sy).sum(3)
                share = torch.where(inside, (here.unsqueeze(3) * weight).unsqueeze(4) * grad, 0.0)
                dtable.index_add_(0, at.flatten(), share.reshape(-1, C))
                dloc[rows, :, level, :, 0] = dx * W
                dloc[rows, :, level, :, 1] = dy * H
                start += H * W
        dlogits = p * (dp - (dp * p).sum((2, 3), keepdim=True))
        return dtable.view(value.shape), None, dloc, dlogits.flatten(2)


def kernel(value, shapes, loc, logits):
    return Deform.apply(value, shapes, loc, logits)


def target():
    return assay.Target(kernel, golden, cases=[pyramid, heads, single], name="deform_attention", outputs=("y",))
