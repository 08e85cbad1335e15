"""mean and var = sum (x - mean)^2 / N by rows; moments of blocks are merged (Chan); with a backward."""

from __future__ import annotations

import torch

from goldsmith import assay

BLOCK = 8


@assay.case(T=[4], N=[29])
def rows(make, T, N):
    return {"x": make.normal(T, N) + 1.0}


@assay.case(T=[7], N=[19])
def few(make, T, N):
    return rows[0].draw(make, T, N)


def golden(x):
    mean = x.mean(1)
    return mean, (x - mean.unsqueeze(1)).square().mean(1)


def forward(x):
    T, N = x.shape
    n, mean, m2 = 0, torch.zeros(T), torch.zeros(T)
    for at in range(0, N, BLOCK):
        part = x[:, at : at + BLOCK]
        k = part.shape[1]
        middle = part.sum(1) / k
        spread = (part - middle.unsqueeze(1)).square().sum(1)
        delta = middle - mean
        mean = mean + delta * (k / (n + k))
        m2 = m2 + spread + delta * delta * (n * k / (n + k))
        n += k
    return mean, m2 / n


def backward(x, mean, grad_mean, grad_var):
    N = x.shape[1]
    slope = grad_var.unsqueeze(1) * (x - mean.unsqueeze(1))
    return {"x": (grad_mean.unsqueeze(1) + 2 * slope) / N}


def target():
    return assay.Target(forward, golden, cases=[rows, few], name="welford", outputs=("mean", "var"), backward=backward)
