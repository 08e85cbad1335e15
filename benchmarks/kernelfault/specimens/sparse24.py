"""y = x w^T + b, of every four weights in a row of w two stored: a product with a matrix in the 2:4 format.

Beside the values each group has four bits, the place of its first and of its second value; a byte holds two groups, the
first one in its low bits. Programs go over tiles of rows of w and take the groups in blocks.
"""

from __future__ import annotations

import torch

from goldsmith import assay

ROWS, GROUPS = 4, 4
PAIRS = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110)


@assay.case(M=[5], N=[6], K=[24])
def rows(make, M, N, K):
    pairs = torch.tensor(PAIRS)[make.integers(0, len(PAIRS), N, K // 4)]
    return {
        "x": make.normal(M, K), "values": make.normal(N, K // 2), "b": make.normal(N),
        "meta": (pairs[:, 0::2] + 16 * pairs[:, 1::2]).to(torch.uint8),
    }  # fmt: skip


@assay.case(M=[3], N=[9], K=[40])
def thin(make, M, N, K):
    return rows[0].draw(make, M, N, K)


def golden(x, values, b, meta):
    bits = torch.stack([meta % 16, meta // 16], -1).flatten(-2)
    places = torch.stack([bits % 4, bits // 4], -1).long()
    w = torch.zeros(*bits.shape, 4, dtype=x.dtype).scatter(-1, places, values.unflatten(-1, (-1, 2)))
    return x @ w.flatten(1).mT + b


def columns(meta, tile, groups):
    """[n, 2 groups] columns of x that the values of those rows and groups belong to."""
    found = torch.empty(tile.stop - tile.start, 2 * (groups.stop - groups.start), dtype=torch.int64)
    for at, group in enumerate(range(groups.start, groups.stop)):
        byte = meta[tile, group // 2].long()
        bits = (byte >> (4 * (group % 2))) & 0xF
        found[:, 2 * at] = 4 * group + (bits & 3)
        found[:, 2 * at + 1] = 4 * group + (bits >> 2)
    return found


def tiles(N, size):
    return [slice(at, min(at + size, N)) for at in range(0, N, size)]


class Sparse24(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, values, b, meta):
        y = torch.empty(len(x), len(values))
        for tile in tiles(len(values), ROWS):
            acc = torch.zeros(len(x), tile.stop - tile.start)
            for groups in tiles(values.shape[1] // 2, GROUPS):
                taken = values[tile, 2 * groups.start : 2 * groups.stop]
                acc += (x[:, columns(meta, tile, groups)] * taken).sum(-1)
            y[:, tile] = acc + b[tile]
        ctx.save_for_backward(x, values, meta)
        return y

    @staticmethod
    def backward(ctx, gy):
        x, values, meta = ctx.saved_tensors
        dx, dvalues = torch.zeros(x.shape), torch.empty(values.shape)
        for tile in tiles(len(values), ROWS):
            g = gy[:, tile].unsqueeze(-1)
            for groups in tiles(values.shape[1] // 2, GROUPS):
                stored = slice(2 * groups.start, 2 * groups.stop)
                where = columns(meta, tile, groups)
                dvalues[tile, stored] = (g * x[:, where]).sum(0)
                share = g * values[tile, stored]
                dx.index_add_(1, where.flatten(), share.flatten(1))
        return dx, dvalues, gy.sum(0), None


def kernel(x, values, b, meta):
    return Sparse24.apply(x, values, b, meta)


def target():
    return assay.Target(kernel, golden, cases=[rows, thin], name="sparse24")
