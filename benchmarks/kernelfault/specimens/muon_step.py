"""w (1 - lr decay) - lr sqrt(max(1, R / C)) x: a step of Muon, x an orthogonal matrix near the momentum's direction.

m' = beta m + g,  u = g + beta m',  x0 = u / |u|, then some steps x <- a x + (b A + c A A) x with A = x x^T (Newton and
Schulz). A tall matrix is turned over before and after. Products go in blocks of rows.
"""

from __future__ import annotations

import torch

from goldsmith import assay

BLOCK = 4
FACTORS = (3.4445, -4.7750, 2.0315)


@assay.case(R=[5], C=[9])
def wide(make, R, C):
    return {
        "w": make.normal(R, C), "g": make.normal(R, C), "m": make.normal(R, C), "lr": 0.1, "beta": 0.75, "decay": 0.5,
        "eps": 1e-7, "steps": 3,
    }  # fmt: skip


@assay.case(R=[10], C=[6])
def tall(make, R, C):
    return {**wide[0].draw(make, R, C), "steps": 2}


def golden(w, g, m, lr, beta, decay, eps, steps):
    m_new = beta * m + g
    u = assay.stage("u", g + beta * m_new)
    x = assay.stage("x0", u / (torch.sqrt(u.square().sum()) + eps))
    if w.shape[0] > w.shape[1]:
        x = x.mT
    a, b, c = FACTORS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    if w.shape[0] > w.shape[1]:
        x = x.mT
    x = assay.stage("x", x)
    return w * (1 - lr * decay) - lr * max(1.0, w.shape[0] / w.shape[1]) ** 0.5 * x, m_new


def blocks(n):
    return [slice(at, min(at + BLOCK, n)) for at in range(0, n, BLOCK)]


def gram_of(x):
    """x x^T: blocks on and below the diagonal, and their mirror."""
    n = len(x)
    out = torch.empty(n, n)
    for i in blocks(n):
        for j in blocks(n):
            if j.start <= i.start:
                tile = x[i] @ x[j].mT
                out[i, j] = tile
                out[j, i] = tile.mT
    return out


def orthogonal(x, steps):
    a, b, c = FACTORS
    for _ in range(steps):
        gram = gram_of(x)
        mixed, after = torch.empty(gram.shape), torch.empty(x.shape)
        for i in blocks(len(x)):
            mixed[i] = b * gram[i] + c * (gram[i] @ gram)
        for i in blocks(len(x)):
            after[i] = a * x[i] + mixed[i] @ x
        x = after
    return x


def step(w, g, m, lr, beta, decay, eps, steps):
    R, C = w.shape
    w_new, m_new, u = torch.empty(R, C), torch.empty(R, C), torch.empty(R, C)
    squares = torch.zeros(())
    for rows in blocks(R):
        m_new[rows] = beta * m[rows] + g[rows]
        u[rows] = g[rows] + beta * m_new[rows]
        squares += u[rows].square().sum()
    u = assay.stage("u", u)
    x = assay.stage("x0", u / (torch.sqrt(squares) + eps))
    turned = R > C
    x = orthogonal(x.mT.contiguous() if turned else x, steps)
    x = assay.stage("x", x.mT if turned else x)
    rate = lr * max(1.0, R / C) ** 0.5
    for rows in blocks(R):
        w_new[rows] = w[rows] * (1 - lr * decay) - rate * x[rows]
    return w_new, m_new


def target():
    return assay.Target(step, golden, cases=[wide, tall], name="muon_step", outputs=("w_new", "m_new"), backward=None)
