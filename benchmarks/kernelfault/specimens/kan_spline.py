"""y = silu(x) base + sum_{i, g} B_g(x_i) coef[i, g]: a layer of cubic splines on edges (KAN), each token by four taps.

B_g are the cubic B-splines of a grid of G equal steps from low to high, with three more knots at either side: G + 3
of them. A number in cell c of the grid meets the splines c to c + 3, as far as these exist. By tiles of tokens.
"""

from __future__ import annotations

import torch

from goldsmith import assay

TILE = 4


@assay.case(T=[10], I=[3], O=[4], G=[5])
def tokens(make, T, I, O, G):
    return {
        "x": make.normal(T, I), "coef": make.normal(I, G + 3, O), "base": make.normal(I, O, std=I**-0.5),
        "low": -1.0, "high": 1.0,
    }  # fmt: skip


@assay.case(T=[6], I=[4], O=[3], G=[4])
def coarse(make, T, I, O, G):
    return {**tokens[0].draw(make, T, I, O, G), "low": -1.5, "high": 1.25}


def golden(x, coef, base, low, high):
    step = (high - low) / (coef.shape[1] - 3)
    far = ((x.unsqueeze(2) - low) / step + 1 - torch.arange(coef.shape[1])).abs()
    bell = (torch.relu(2 - far) ** 3 - 4 * torch.relu(1 - far) ** 3) / 6
    basis = assay.stage("basis", torch.where(far < 2, bell, 0.0))
    return torch.einsum("tig,igo->to", basis, coef) + x * torch.sigmoid(x) @ base


def locate(x, low, high, G):
    """The cell, and the place in it from 0 to 1."""
    p = (x - low) * (G / (high - low))
    cell = torch.floor(p)
    return cell.long(), p - cell


def taps(u):
    v = 1 - u
    return torch.stack([v**3, 3 * u**3 - 6 * u**2 + 4, 3 * v**3 - 6 * v**2 + 4, u**3], 2) / 6


def slopes(u):
    v = 1 - u
    return torch.stack([-(v**2), 3 * u**2 - 4 * u, 4 * v - 3 * v**2, u**2], 2) / 2


def forward(x, coef, base, low, high):
    T, I = x.shape
    splines, O = coef.shape[1:]
    basis, y = torch.zeros(T, I, splines), torch.empty(T, O)
    for at in range(0, T, TILE):
        tile = x[at : at + TILE]
        cell, u = locate(tile, low, high, splines - 3)
        weight = taps(u)
        for tap in range(4):
            g = cell + tap
            inside = (g >= 0) & (g < splines)
            token, i = torch.nonzero(inside, as_tuple=True)
            basis[at + token, i, g[token, i]] = weight[token, i, tap]
    basis = assay.stage("basis", basis)
    for at in range(0, T, TILE):
        tile = x[at : at + TILE]
        y[at : at + TILE] = (tile * torch.sigmoid(tile)) @ base
        y[at : at + TILE] += basis[at : at + TILE].flatten(1) @ coef.reshape(-1, O)
    return y


def backward(x, coef, base, low, high, grad_y):
    T, I = x.shape
    splines, O = coef.shape[1:]
    dx, dcoef, dbase = torch.empty(T, I), torch.zeros(I * splines, O), torch.zeros(I, O)
    flat = coef.reshape(-1, O)
    rate = (splines - 3) / (high - low)
    for at in range(0, T, TILE):
        tile, g = x[at : at + TILE], grad_y[at : at + TILE]
        s = torch.sigmoid(tile)
        acc = (g @ base.mT) * (s + tile * s * (1 - s))
        dbase += (tile * s).mT @ g
        cell, u = locate(tile, low, high, splines - 3)
        weight, slope = taps(u), slopes(u)
        for tap in range(4):
            spline = cell + tap
            token, i = torch.nonzero((spline >= 0) & (spline < splines), as_tuple=True)
            row = i * splines + spline[token, i]
            dcoef.index_add_(0, row, weight[token, i, tap].unsqueeze(1) * g[token])
            acc[token, i] += rate * slope[token, i, tap] * (flat[row] * g[token]).sum(1)
        dx[at : at + TILE] = acc
    return {"x": dx, "coef": dcoef.view(I, splines, O), "base": dbase}


def target():
    return assay.Target(
        forward, golden, cases=[tokens, coarse], name="kan_spline", outputs=("y",), backward=backward
    )  # fmt: skip
