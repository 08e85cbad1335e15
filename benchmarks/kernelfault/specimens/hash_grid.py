"""y[p] = for each level, the bilinear mean of four rows of its table: Instant-NGP's hash encoding of points in 2D.

Level l has base 2^l cells a side. Where a table has a row for every corner, rows are x + y (cells + 1), otherwise
x xor (y 2654435761 in 32 bits); both modulo the rows of a table. Gradients of tables are added by index.
"""

from __future__ import annotations

import torch

from goldsmith import assay

PRIME, WORD, TILE = 2654435761, 0xFFFFFFFF, 4


@assay.case(P=[9], L=[3], S=[13], F=[2], base=[2])
def points(make, P, L, S, F, base):
    pos = make.uniform(P, 2)
    pos[-1] = pos[0]
    return {"pos": pos, "table": make.normal(L, S, F), "base": base}


@assay.case(P=[6], L=[2], S=[27], F=[3], base=[4])
def fine(make, P, L, S, F, base):
    return points[0].draw(make, P, L, S, F, base)


@assay.case(P=[14], L=[4], S=[11], F=[1], base=[2])
def deep(make, P, L, S, F, base):
    return points[0].draw(make, P, L, S, F, base)


def golden(pos, table, base):
    L, S, _ = table.shape
    parts = []
    for level in range(L):
        cells = base * 2**level
        scaled = pos * cells
        corner = torch.floor(scaled)
        fx, fy = (scaled - corner).unsqueeze(2).unbind(1)
        x, y = corner.detach().long().unbind(1)
        part = 0
        for right in (0, 1):
            for up in (0, 1):
                if (cells + 1) ** 2 <= S:
                    row = (x + right + (y + up) * (cells + 1)) % S
                else:
                    row = ((x + right) ^ ((y + up) * PRIME & WORD)) % S
                part = part + (fx if right else 1 - fx) * (fy if up else 1 - fy) * table[level][row]
        parts.append(part)
    return torch.cat(parts, 1)


def rows_of(x, y, cells, S):
    """The table's rows of corners."""
    if (cells + 1) * (cells + 1) <= S:
        return (x + y * (cells + 1)) % S
    return (x ^ ((y * PRIME) & WORD)) % S


def corners(pos, cells, S):
    """For each corner of a point's cell: its row, and what its weight has of x and of y, with their signs."""
    scaled = pos * cells
    low = torch.floor(scaled)
    fx, fy = (scaled - low).unbind(1)
    x, y = low.long().unbind(1)
    for right in (0, 1):
        for up in (0, 1):
            wx, wy = (fx if right else 1 - fx), (fy if up else 1 - fy)
            yield rows_of(x + right, y + up, cells, S), wx, wy, 2 * right - 1, 2 * up - 1


class HashGrid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pos, table, base):
        P, (L, S, F) = len(pos), table.shape
        y = torch.zeros(P, L, F)
        for at in range(0, P, TILE):
            now = slice(at, min(at + TILE, P))
            for level in range(L):
                for row, wx, wy, _, _ in corners(pos[now], base * 2**level, S):
                    y[now, level] += (wx * wy).unsqueeze(1) * table[level][row]
        ctx.save_for_backward(pos, table)
        ctx.base = base
        return y.flatten(1)

    @staticmethod
    def backward(ctx, g):
        pos, table = ctx.saved_tensors
        P, (L, S, F) = len(pos), table.shape
        g = g.reshape(P, L, F)
        dpos, dtable = torch.zeros(P, 2), torch.zeros(L, S, F)
        for level in range(L):
            cells = ctx.base * 2**level
            own = g[:, level]
            for row, wx, wy, sx, sy in corners(pos, cells, S):
                dtable[level].index_add_(0, row, (wx * wy).unsqueeze(1) * own)
                dw = (own * table[level][row]).sum(1)
                dpos[:, 0] += dw * wy * (sx * cells)
                dpos[:, 1] += dw * wx * (sy * cells)
        return dpos, dtable, None


def kernel(pos, table, base):
    return HashGrid.apply(pos, table, base)


def target():
    return assay.Target(kernel, golden, cases=[points, fine, deep], name="hash_grid", outputs=("y",))
