"""x with lower[i] x[i-1] + diag[i] x[i] + upper[i] x[i+1] = rhs[i] for each of B systems: the Thomas algorithm.

Loops in numpy as a C++ kernel has them, float32: one elimination from the top, one substitution from the bottom, with
the factors of the elimination kept. The backward solves the transposed systems with the same factors: first down with
the kept diagonal, then up. lower[0] and upper[N - 1] are not used.
"""

from __future__ import annotations

import numpy as np
import torch

from goldsmith import assay


@assay.case(B=[3], N=[7])
def systems(make, B, N):
    return {
        "lower": 0.5 * make.normal(B, N), "diag": 3 + make.uniform(B, N), "upper": 0.5 * make.normal(B, N),
        "rhs": make.normal(B, N),
    }  # fmt: skip


@assay.case(B=[2], N=[12])
def long(make, B, N):
    drawn = systems[0].draw(make, B, N)
    return {**drawn, "diag": -drawn["diag"]}


def golden(lower, diag, upper, rhs):
    matrix = torch.diag_embed(diag) + torch.diag_embed(lower[:, 1:], -1) + torch.diag_embed(upper[:, :-1], 1)
    return torch.linalg.solve(matrix, rhs.unsqueeze(-1)).squeeze(-1)


def solve(lower, diag, upper, rhs):
    """The solutions, and of the elimination the pivots and the upper diagonal divided by them."""
    B, N = rhs.shape
    x, pivot, ratio = np.empty_like(rhs), np.empty_like(rhs), np.empty_like(rhs)
    for b in range(B):
        pivot[b, 0] = diag[b, 0]
        ratio[b, 0] = upper[b, 0] / pivot[b, 0]
        x[b, 0] = rhs[b, 0] / pivot[b, 0]
        for i in range(1, N):
            pivot[b, i] = diag[b, i] - lower[b, i] * ratio[b, i - 1]
            ratio[b, i] = upper[b, i] / pivot[b, i]
            x[b, i] = (rhs[b, i] - lower[b, i] * x[b, i - 1]) / pivot[b, i]
        for i in range(N - 2, -1, -1):
            x[b, i] -= ratio[b, i] * x[b, i + 1]
    return x, pivot, ratio


def solve_transposed(lower, pivot, ratio, g):
    """y of the transposed systems, whose factors are those of the elimination in the other order."""
    B, N = g.shape
    y = np.empty_like(g)
    for b in range(B):
        y[b, 0] = g[b, 0]
        for i in range(1, N):
            y[b, i] = g[b, i] - ratio[b, i - 1] * y[b, i - 1]
        y[b, N - 1] /= pivot[b, N - 1]
        for i in range(N - 2, -1, -1):
            y[b, i] = (y[b, i] - lower[b, i + 1] * y[b, i + 1]) / pivot[b, i]
    return y


def gradients(y, x):
    """Of the three diagonals: -y[i] times the x that each of them meets."""
    B, N = x.shape
    dlower, ddiag, dupper = np.zeros_like(x), np.empty_like(x), np.zeros_like(x)
    for b in range(B):
        for i in range(N):
            ddiag[b, i] = -y[b, i] * x[b, i]
            if i > 0:
                dlower[b, i] = -y[b, i] * x[b, i - 1]
            if i < N - 1:
                dupper[b, i] = -y[b, i] * x[b, i + 1]
    return dlower, ddiag, dupper


class Thomas(torch.autograd.Function):
    @staticmethod
    def forward(ctx, lower, diag, upper, rhs):
        x, pivot, ratio = solve(*(t.detach().numpy() for t in (lower, diag, upper, rhs)))
        x = torch.from_numpy(x)
        ctx.save_for_backward(lower, x, torch.from_numpy(pivot), torch.from_numpy(ratio))
        return x

    @staticmethod
    def backward(ctx, g):
        lower, x, pivot, ratio = (t.detach().numpy() for t in ctx.saved_tensors)
        y = solve_transposed(lower, pivot, ratio, g.numpy())
        return *(torch.from_numpy(d) for d in gradients(y, x)), torch.from_numpy(y)


def kernel(lower, diag, upper, rhs):
    return Thomas.apply(lower, diag, upper, rhs)


def target():
    return assay.Target(kernel, golden, cases=[systems, long], name="thomas_solve", outputs=("x",))
