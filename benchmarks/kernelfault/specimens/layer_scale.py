"""y = res + gamma (x + bias) keep / (1 - p): LayerScale and dropout from a mask of bits, in bfloat16.

The mask has a byte for eight columns, the first one in its lowest bit. Rows go in tiles, everything in between is
float32, and results are rounded once when they are stored; sums over rows are left in a workspace by tiles.
"""

from __future__ import annotations

import torch

from goldsmith import assay

ROWS = 4


@assay.case(T=[10], D=[20])
def tokens(make, T, D):
    mask = make.integers(0, 256, T, -(-D // 8)).to(torch.uint8)
    return {
        "x": make.normal(T, D), "res": make.normal(T, D), "gamma": make.normal(D), "bias": make.normal(D),
        "mask": mask, "p": 0.5,
    }  # fmt: skip


@assay.case(T=[7], D=[11])
def narrow(make, T, D):
    return tokens[0].draw(make, T, D)


def golden(x, res, gamma, bias, mask, p):
    bits = (mask.long().unsqueeze(2) >> torch.arange(8)) & 1
    keep = bits.flatten(1)[:, : x.shape[1]].to(x.dtype)
    return res + gamma * ((x + bias) * keep / (1 - p))


def kept(mask, first, rows, D):
    """Whether each number of the tile that begins at row first is kept."""
    row, column = torch.arange(first, first + rows).unsqueeze(1), torch.arange(D)
    byte = mask.reshape(-1)[row * -(-D // 8) + column // 8].long()
    return (byte >> (column % 8)) & 1


class LayerScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, res, gamma, bias, mask, p):
        T, D = x.shape
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        scale, shift = gamma.float() / (1 - p), bias.float()
        for at in range(0, T, ROWS):
            tile = x[at : at + ROWS].float() + shift
            tile = tile * kept(mask, at, len(tile), D)
            y[at : at + ROWS] = (res[at : at + ROWS].float() + scale * tile).to(y.dtype)
        ctx.save_for_backward(x, gamma, bias, mask)
        ctx.p = p
        return y

    @staticmethod
    def backward(ctx, g):
        x, gamma, bias, mask = ctx.saved_tensors
        T, D = x.shape
        blocks = -(-T // ROWS)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dgamma, dbias = torch.empty(blocks, D), torch.empty(blocks, D)
        for block in range(blocks):
            rows = slice(block * ROWS, min((block + 1) * ROWS, T))
            tile = x[rows].float() + bias.float()
            passed = g[rows].float() * kept(mask, rows.start, len(tile), D) / (1 - ctx.p)
            dtile = passed * gamma.float()
            dx[rows] = dtile.to(dx.dtype)
            dgamma[block] = (passed * tile).sum(0)
            dbias[block] = dtile.sum(0)
        return dx, g.clone(), dgamma.sum(0).to(gamma.dtype), dbias.sum(0).to(bias.dtype), None, None


def kernel(x, res, gamma, bias, mask, p):
    return LayerScale.apply(x, res, gamma, bias, mask, p)


def target():
    return assay.Target(
        kernel, golden, cases=[tokens, narrow], name="layer_scale", outputs=("y",), dtypes=(torch.bfloat16,)
    )  # fmt: skip
