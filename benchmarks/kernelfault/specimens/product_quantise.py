"""y = the nearest code of each part of x,  loss = beta mean((x - y)^2): product quantisation with a learned codebook.

The nearest is that of the largest x . c - |c|^2 / 2, found by tiles of codes with the best so far kept.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

TILE = 4


@assay.case(T=[13], G=[2], K=[10], D=[3])
def tokens(make, T, G, K, D):
    return {"x": make.normal(T, G, D), "codes": make.normal(G, K, D), "beta": 0.25}


@assay.case(T=[20], G=[3], K=[5], D=[4])
def few(make, T, G, K, D):
    return tokens[0].draw(make, T, G, K, D)


def golden(x, codes, beta):
    near = assay.stage("near", torch.einsum("tgd,gkd->tgk", x, codes) - codes.square().sum(-1) / 2)
    code = assay.stage("code", near.argmax(-1))
    y = codes[torch.arange(len(codes)), code]
    return y, beta * (x - y).square().mean(), code


def forward(x, codes, beta):
    T, (G, K, D) = len(x), codes.shape
    y, code, total = torch.empty(T, G, D), torch.zeros(T, G, dtype=torch.int64), torch.zeros(())
    for g in range(G):
        best, at_best = torch.full((T,), -math.inf), torch.zeros(T, dtype=torch.int64)
        for at in range(0, K, TILE):
            tile = codes[g, at : at + TILE]
            near = x[:, g] @ tile.mT - (tile * tile).sum(1) / 2
            top, place = near.max(1)
            better = top > best
            best = torch.where(better, top, best)
            at_best = torch.where(better, place + at, at_best)
        table = codes.reshape(G * K, D)
        chosen = table[g * K + at_best]
        y[:, g], code[:, g] = chosen, at_best
        total += (x[:, g] - chosen).square().sum()
    return y, total * beta / (T * G * D), code


def backward(x, codes, beta, y, code, grad_y, grad_loss):
    T, (G, K, D) = len(x), codes.shape
    pull = (x - y) * (2 * beta * grad_loss / (T * G * D))
    dy = grad_y - pull
    dcodes = torch.zeros(G, K, D)
    for g in range(G):
        dcodes[g].index_add_(0, code[:, g], dy[:, g])
    return {"x": pull, "codes": dcodes}


def target():
    return assay.Target(
        forward, golden, cases=[tokens, few], name="product_quantise", outputs=("y", "loss", "code"),
        backward=backward, decisions={"code": assay.argmax(scores="near")},
    )  # fmt: skip
