"""y = (silu(x Wg) * (x Wu)) Wd + bias, hidden columns divided among ranks: column parallel, then row parallel.

Each rank has its part of the hidden columns and makes a share of y; shares are summed over ranks. Only x is saved: the
backward forms gate and up again, rank by rank.
"""

from __future__ import annotations

import torch

from goldsmith import assay

RANKS = 3
TILE = 4


@assay.case(T=[7], D=[5], F=[12])
def tokens(make, T, D, F):
    return {
        "x": make.normal(T, D), "wg": make.normal(D, F, std=D**-0.5), "wu": make.normal(D, F, std=D**-0.5),
        "wd": make.normal(F, D, std=F**-0.5), "bias": make.normal(D),
    }  # fmt: skip


@assay.case(T=[10], D=[6], F=[9])
def more(make, T, D, F):
    return tokens[0].draw(make, T, D, F)


def golden(x, wg, wu, wd, bias):
    gate = assay.stage("gate", x @ wg)
    up = assay.stage("up", x @ wu)
    hidden = assay.stage("hidden", torch.nn.functional.silu(gate) * up)
    return hidden @ wd + bias


def parts(F):
    width = F // RANKS
    return [slice(rank * width, (rank + 1) * width) for rank in range(RANKS)]


def tiles(T):
    return [slice(at, min(at + TILE, T)) for at in range(0, T, TILE)]


def shard(wd, part):
    """A rank's rows of the last product's weights."""
    return wd[part].contiguous()


def rank_forward(x, wg, wu, part):
    gate, up = x @ wg[:, part], x @ wu[:, part]
    return gate, up, gate * torch.sigmoid(gate) * up


def forward(x, wg, wu, wd, bias):
    T, F = len(x), wg.shape[1]
    hidden = torch.empty(T, F)
    shares = torch.zeros(RANKS, *x.shape)
    for rank, part in enumerate(parts(F)):
        mine = shard(wd, part)
        for rows in tiles(T):
            _, _, hidden[rows, part] = rank_forward(x[rows], wg, wu, part)
            shares[rank, rows] = hidden[rows, part] @ mine
    y = torch.zeros(x.shape)
    for rank in range(RANKS):
        y += shares[rank]
    return y + bias


def backward(x, wg, wu, wd, bias, grad_y):
    T, F = len(x), wg.shape[1]
    dx, dwg, dwu, dwd = torch.zeros(x.shape), torch.zeros(wg.shape), torch.zeros(wu.shape), torch.zeros(wd.shape)
    dgates, dups = torch.empty(T, F), torch.empty(T, F)
    for part in parts(F):
        for rows in tiles(T):
            gate, up, hidden = rank_forward(x[rows], wg, wu, part)
            s = torch.sigmoid(gate)
            dhidden = grad_y[rows] @ wd[part].mT
            dgates[rows, part] = dhidden * up * s * (1 + gate * (1 - s))
            dups[rows, part] = dhidden * gate * s
            dwd[part] += hidden.mT @ grad_y[rows]
    dgates, dups = assay.stage("gate.grad", dgates), assay.stage("up.grad", dups)
    for part in parts(F):
        for rows in tiles(T):
            dgate, dup = dgates[rows, part], dups[rows, part]
            dwg[:, part] += x[rows].mT @ dgate
            dwu[:, part] += x[rows].mT @ dup
            dx[rows] += dgate @ wg[:, part].mT + dup @ wu[:, part].mT
    return {"x": dx, "wg": dwg, "wu": dwu, "wd": dwd, "bias": grad_y.sum(0)}


def target():
    return assay.Target(forward, golden, cases=[tokens, more], name="parallel_swiglu", backward=backward)
