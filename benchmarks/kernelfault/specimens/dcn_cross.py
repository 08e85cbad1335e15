"""x_{l+1} = x_0 (tanh(x_l v_l) u_l + c_l) + x_l,  x_0 = the embeddings of a row's fields side by side.

The cross network of a ranking model, low-rank: each layer multiplies the first features with a projection of the last
ones. Fields share one table of embeddings, field f from row offsets[f] on; the id -1 means that the field is missing,
and its features are 0. Plain torch by tiles of rows. The backward keeps every layer's input, goes back through the
layers, and collects what reaches x_0 from all of them.
"""

from __future__ import annotations

import torch

from goldsmith import assay

TILE = 4


@assay.case(B=[6], F=[3], E=[4], L=[2], R=[3], ROWS=[5])
def ranking(make, B, F, E, L, R, ROWS):
    D = F * E
    ids = make.integers(-1, ROWS, B, F)
    ids[1, 0] = -1
    return {
        "table": make.normal(F * ROWS, E), "v": make.normal(L, D, R, std=0.3), "u": make.normal(L, R, D, std=0.5),
        "c": make.normal(L, D, std=0.5), "ids": ids, "offsets": ROWS * torch.arange(F, device=make.device),
    }  # fmt: skip


@assay.case(B=[3], F=[2], E=[3], L=[3], R=[2], ROWS=[4])
def transposed_weights(make, B, F, E, L, R, ROWS):
    u = make.normal(L, F * E, R, std=0.5).mT
    return {**ranking[0].draw(make, B, F, E, L, R, ROWS), "u": u, "v": make.normal(L, R, F * E, std=0.3).mT}


def golden(table, v, u, c, ids, offsets):
    rows = table[ids.clamp(min=0) + offsets] * (ids >= 0).unsqueeze(-1)
    first = rows.flatten(1)
    x = first
    for layer in range(len(v)):
        low = torch.tanh(x @ v[layer])
        x = assay.stage(f"x{layer + 1}", first * (low @ u[layer] + c[layer]) + x)
    return x


def tiles(B):
    return [slice(at, min(at + TILE, B)) for at in range(0, B, TILE)]


def gathered(table, ids, offsets):
    """The embeddings of a tile's rows, [rows, F * E], with zeros for missing fields."""
    rows = table.index_select(0, (ids.clamp(min=0) + offsets).flatten())
    return (rows.view(*ids.shape, -1) * (ids >= 0).unsqueeze(-1)).flatten(1)


class DCNCross(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, v, u, c, ids, offsets):
        (B, F), L, E = ids.shape, v.shape[0], table.shape[1]
        states = table.new_empty(L + 1, B, F * E)
        lows = table.new_empty(L, B, v.shape[2])
        for now in tiles(B):
            states[0, now] = gathered(table, ids[now], offsets)
        for layer in range(L):
            for now in tiles(B):
                first, x = states[0, now], states[layer, now]
                lows[layer, now] = torch.tanh(x @ v[layer])
                states[layer + 1, now] = first * torch.addmm(c[layer], lows[layer, now], u[layer]) + x
            states[layer + 1] = assay.stage(f"x{layer + 1}", states[layer + 1])
        ctx.save_for_backward(states, lows, v, u, c, ids, offsets)
        ctx.rows = table.shape
        return states[L].clone()

    @staticmethod
    def backward(ctx, g):
        states, lows, v, u, c, ids, offsets = ctx.saved_tensors
        B, L, E = len(ids), v.shape[0], ctx.rows[1]
        dtable = g.new_zeros(ctx.rows)
        dv, du, dc = torch.zeros_like(v), torch.zeros_like(u), torch.zeros_like(c)
        for now in tiles(B):
            first, dx = states[0, now], g[now]
            dfirst = torch.zeros_like(first)
            for layer in reversed(range(L)):
                x, low = states[layer, now], lows[layer, now]
                dfirst += dx * torch.addmm(c[layer], low, u[layer])
                dcross = dx * first
                dc[layer] += dcross.sum(0)
                du[layer] += low.T @ dcross
                dlow = (dcross @ u[layer].T) * (1 - low * low)
                dv[layer] += x.T @ dlow
                dx = dx + dlow @ v[layer].T
            dfirst = dfirst + dx
            there = (ids[now] >= 0).flatten()
            index = (ids[now].clamp(min=0) + offsets).flatten()
            dtable.index_add_(0, index[there], dfirst.reshape(-1, E)[there])
        return dtable, dv, du, dc, None, None


def kernel(table, v, u, c, ids, offsets):
    return DCNCross.apply(table, v, u, c, ids, offsets)


def target():
    return assay.Target(kernel, golden, cases=[ranking, transposed_weights], name="dcn_cross", outputs=("y",))
