"""y = s clamp(round(w / s), -8, 7) by output channels, with the gradients of a learned step size (LSQ).

The gradient goes straight through the rounding and stops where a code is at its limit; that of s is the rounding's
error, or the limit, and is made smaller by 1 / sqrt(7 I). Programs go over tiles of rows and of columns.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

LOW, HIGH = -8, 7
ROWS, COLUMNS = 2, 8


@assay.case(O=[5], I=[19])
def weights(make, O, I):
    return {"w": make.normal(O, I), "s": 0.1 + 0.2 * make.uniform(O)}


@assay.case(O=[4], I=[9])
def few(make, O, I):
    return weights[0].draw(make, O, I)


def golden(w, s):
    slow = 1 / math.sqrt(HIGH * w.shape[1])
    step = (s * slow + (s - s * slow).detach()).unsqueeze(1)
    v = (w / step).clamp(LOW, HIGH)
    code = assay.stage("code", v + (v.round() - v).detach())
    return code * step


def tiles(O, I):
    for row in range(0, O, ROWS):
        for column in range(0, I, COLUMNS):
            yield slice(row, min(row + ROWS, O)), slice(column, min(column + COLUMNS, I))


def forward(w, s):
    code = torch.empty(w.shape)
    for rows, columns in tiles(*w.shape):
        v = w[rows, columns] / s[rows].unsqueeze(1)
        code[rows, columns] = torch.clamp(torch.round(v), LOW, HIGH)
    code = assay.stage("code", code)
    return code * s.unsqueeze(1)


def backward(w, s, grad_y):
    dw, ds = torch.empty(w.shape), torch.zeros(len(s))
    slow = 1 / math.sqrt(HIGH * w.shape[1])
    for rows, columns in tiles(*w.shape):
        g = grad_y[rows, columns]
        v = w[rows, columns] / s[rows].unsqueeze(1)
        inside = (v >= LOW) & (v <= HIGH)
        dw[rows, columns] = torch.where(inside, g, 0.0)
        error = torch.where(inside, torch.round(v) - v, torch.clamp(v, LOW, HIGH))
        ds[rows] += (g * error).sum(1) * slow
    return {"w": dw, "s": ds}


def target():
    return assay.Target(
        forward, golden, cases=[weights, few], name="fake_quant", outputs=("y",), backward=backward,
        surrogate=("w", "s"),
    )  # fmt: skip
