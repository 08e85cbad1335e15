"""a = L L^T and logdet = log det a of many small matrices, column by column, and the backward from the last column.

Only the lower triangle of a is read, and only that has a gradient. A program has one matrix; here all go at once.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(B=[3], N=[5])
def matrices(make, B, N):
    m = make.normal(B, N, N)
    return {"a": (m @ m.mT / N + torch.eye(N, dtype=m.dtype))}


@assay.case(B=[2], N=[4])
def small(make, B, N):
    return matrices[0].draw(make, B, N)


def golden(a):
    N, columns = a.shape[1], []
    for j in range(N):
        rest = a[:, j:, j]
        for before in columns:
            rest = rest - before[:, j:] * before[:, j : j + 1]
        root = torch.sqrt(rest[:, :1])
        columns.append(torch.cat([rest.new_zeros(len(a), j), root, rest[:, 1:] / root], 1))
    lower = torch.stack(columns, 2)
    return lower, 2 * torch.log(lower.diagonal(dim1=1, dim2=2)).sum(1)


class Cholesky(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        B, N, _ = a.shape
        lower, logdet = torch.zeros(B, N, N), torch.zeros(B)
        for j in range(N):
            rest = a[:, j:, j].clone()
            for k in range(j):
                rest -= lower[:, j:, k] * lower[:, j, k].unsqueeze(1)
            root = torch.sqrt(rest[:, 0])
            lower[:, j, j] = root
            lower[:, j + 1 :, j] = rest[:, 1:] / root.unsqueeze(1)
            logdet += 2 * torch.log(root)
        ctx.save_for_backward(lower)
        return lower, logdet

    @staticmethod
    def backward(ctx, grad_lower, grad_logdet):
        (lower,) = ctx.saved_tensors
        B, N, _ = lower.shape
        g, da = grad_lower.clone(), torch.zeros(B, N, N)
        for j in reversed(range(N)):
            root = lower[:, j, j]
            below = lower[:, j + 1 :, j]
            droot = g[:, j, j] + 2 * grad_logdet / root - (g[:, j + 1 :, j] * below).sum(1) / root
            da[:, j, j] = droot / (2 * root)
            da[:, j + 1 :, j] = g[:, j + 1 :, j] / root.unsqueeze(1)
            for k in range(j):
                column = da[:, j:, j]
                g[:, j:, k] -= column * lower[:, j, k].unsqueeze(1)
                g[:, j, k] -= (column * lower[:, j:, k]).sum(1)
        return da


def kernel(a):
    return Cholesky.apply(a)


def target():
    return assay.Target(kernel, golden, cases=[matrices, small], name="cholesky", outputs=("lower", "logdet"))
