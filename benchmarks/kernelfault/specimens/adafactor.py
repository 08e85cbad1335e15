"""p - lr u / max(1, rms(u) / clip),  u = g / sqrt(r c / mean(r)): a step of Adafactor with its two factored moments.

r and c are moving means of g^2 over columns and rows. The step goes over blocks of rows three times: for the moments,
for the rms of the update, and for the update.
"""

from __future__ import annotations

import torch

from goldsmith import assay

BLOCK = 4


@assay.case(R=[10], C=[7])
def matrix(make, R, C):
    return {
        "p": make.normal(R, C), "g": make.normal(R, C), "r": make.uniform(R), "c": make.uniform(C), "lr": 0.05,
        "beta": 0.75, "eps": 1e-12, "clip": 0.5,
    }  # fmt: skip


@assay.case(R=[5], C=[12])
def wide(make, R, C):
    """Nothing is clipped."""
    return {**matrix[0].draw(make, R, C), "clip": 8.0}


def golden(p, g, r, c, lr, beta, eps, clip):
    square = g.square() + eps
    r_new = beta * r + (1 - beta) * square.mean(1)
    c_new = beta * c + (1 - beta) * square.mean(0)
    u = g / torch.sqrt(torch.outer(r_new, c_new) / r_new.mean())
    rms = u.square().mean().sqrt()
    return p - lr * u / torch.clamp(rms / clip, min=1), r_new, c_new


def step(p, g, r, c, lr, beta, eps, clip):
    R, C = p.shape
    p_new, r_new, c_new = torch.empty(R, C), torch.empty(R), torch.empty(C)
    blocks = [slice(at, min(at + BLOCK, R)) for at in range(0, R, BLOCK)]
    columns = torch.zeros(C)
    for rows in blocks:
        square = g[rows] * g[rows] + eps
        r_new[rows] = beta * r[rows] + (1 - beta) * (square.sum(1) / C)
        columns += square.sum(0)
    c_new[:] = beta * c + (1 - beta) * (columns / R)
    mean = r_new.sum() / R
    row_factor, column_factor = torch.rsqrt(r_new / mean), torch.rsqrt(c_new)
    squares = torch.zeros(())
    for rows in blocks:
        u = g[rows] * row_factor[rows].unsqueeze(1) * column_factor
        squares += (u * u).sum()
    rms = torch.sqrt(squares / (R * C))
    rate = lr / torch.clamp(rms / clip, min=1.0)
    for rows in blocks:
        u = g[rows] * row_factor[rows].unsqueeze(1) * column_factor
        p_new[rows] = p[rows] - rate * u
    return p_new, r_new, c_new


def target():
    return assay.Target(
        step, golden, cases=[matrix, wide], name="adafactor", outputs=("p_new", "r_new", "c_new"), backward=None
    )
