"""y = (x W^T + s drop(x) A^T B^T) mag / |W + s B A| + bias: a linear layer with DoRA, norms by rows, W frozen.

The norm is held for a constant in the backward, as the paper has it. It is summed over tiles of rows and columns, so
that the merged weight is never held. The mask of the dropout before A is an input.
"""

from __future__ import annotations

import torch

from goldsmith import assay

ROWS, COLUMNS = 4, 8


@assay.case(T=[6], D=[19], O=[10], R=[3])
def tokens(make, T, D, O, R):
    return {
        "x": make.normal(T, D), "weight": make.normal(O, D, std=D**-0.5), "a": make.normal(R, D),
        "b": make.normal(O, R, std=0.3), "mag": 1 + make.uniform(O), "bias": make.normal(O),
        "keep": make.uniform(T, D) >= 0.3, "p": 0.3, "s": 0.6,
    }  # fmt: skip


@assay.case(T=[3], D=[9], O=[13], R=[2])
def tall(make, T, D, O, R):
    return tokens[0].draw(make, T, D, O, R)


@assay.case(T=[11], D=[8], O=[5], R=[4])
def many(make, T, D, O, R):
    return {**tokens[0].draw(make, T, D, O, R), "s": 2.5}


def golden(x, weight, a, b, mag, bias, keep, p, s):
    norm = assay.stage("norm", (weight + s * (b @ a)).square().sum(1).sqrt().detach())
    dropped = x * keep.to(x.dtype) / (1 - p)
    low = assay.stage("low", dropped @ a.mT)
    pre = assay.stage("pre", x @ weight.mT + s * (low @ b.mT))
    return pre * (mag / norm) + bias


def tiles(size, step):
    return [slice(at, min(at + step, size)) for at in range(0, size, step)]


class DoRA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, a, b, mag, bias, keep, p, s):
        (T, D), O = x.shape, len(weight)
        squares = torch.zeros(O)
        for rows in tiles(O, ROWS):
            for columns in tiles(D, COLUMNS):
                merged = weight[rows, columns] + s * (b[rows] @ a[:, columns])
                squares[rows] += (merged * merged).sum(1)
        norm = assay.stage("norm", torch.sqrt(squares))
        low = assay.stage("low", (x * keep / (1 - p)) @ a.mT)
        pre = torch.empty(T, O)
        for rows in tiles(O, ROWS):
            pre[:, rows] = x @ weight[rows].mT + s * (low @ b[rows].mT)
        pre = assay.stage("pre", pre)
        y = pre * (mag / norm) + bias
        ctx.save_for_backward(x, weight, a, b, mag, keep, norm, low, pre)
        ctx.p, ctx.s = p, s
        return y

    @staticmethod
    def backward(ctx, g):
        x, weight, a, b, mag, keep, norm, low, pre = ctx.saved_tensors
        s = ctx.s
        dmag, dbias = (g * pre).sum(0) / norm, g.sum(0)
        dpre = g * (mag / norm)
        db = s * (dpre.mT @ low)
        dlow = assay.stage("low.grad", s * (dpre @ b))
        da = dlow.mT @ (x * keep / (1 - ctx.p))
        dx = (dlow @ a) * keep / (1 - ctx.p)
        for rows in tiles(len(weight), ROWS):
            dx += dpre[:, rows] @ weight[rows]
        return dx, None, da, db, dmag, dbias, None, None, None


def kernel(x, weight, a, b, mag, bias, keep, p, s):
    return DoRA.apply(x, weight, a, b, mag, bias, keep, p, s)


def target():
    return assay.Target(
        kernel, golden, cases=[tokens, tall, many], name="dora_linear", outputs=("y",),
        grads=("x", "a", "b", "mag", "bias"), surrogate=("a", "b"),
    )  # fmt: skip
