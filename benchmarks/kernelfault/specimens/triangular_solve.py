"""x = L^-1 b by forward substitution; db = L^-T g, dL = -tril(db x^T): what Gaussian processes and delta rules need.

Only the lower triangle of L is read: what stands above its diagonal is somebody else's.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(N=[7], D=[4])
def systems(make, N, D):
    return {"L": make.normal(N, N, std=0.4) + 2 * torch.eye(N, dtype=make.dtype), "b": make.normal(N, D)}


@assay.case(N=[12], D=[3])
def larger(make, N, D):
    return systems[0].draw(make, N, D)


def golden(L, b):
    rows = []
    for i in range(len(b)):
        known = sum((L[i, j] * rows[j] for j in range(i)), torch.zeros_like(b[i]))
        rows.append((b[i] - known) / L[i, i])
    return torch.stack(rows)


def forward(L, b):
    x = torch.empty(b.shape)
    for i in range(len(b)):
        rest = b[i] - L[i, :i] @ x[:i]
        x[i] = rest / L[i, i]
    return x


def backward(L, b, y, grad_y):
    db = torch.empty(b.shape)
    for i in reversed(range(len(b))):
        rest = grad_y[i] - L[i + 1 :, i] @ db[i + 1 :]
        db[i] = rest / L[i, i]
    dL = -(db @ y.mT).tril()
    return {"L": dL, "b": db}


def target():
    return assay.Target(forward, golden, cases=[systems, larger], name="triangular_solve", backward=backward)
