"""y = silu(a) b through an autograd.Function, both gradients by hand from the saved inputs."""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(T=[11], D=[33])
def tokens(make, T, D):
    return {"a": make.normal(T, D), "b": make.normal(T, D)}


@assay.case(T=[4], D=[64])
def even(make, T, D):
    return tokens[0].draw(make, T, D)


@assay.case(T=[20], D=[7])
def narrow(make, T, D):
    return tokens[0].draw(make, T, D)


def golden(a, b):
    act = assay.stage("act", torch.nn.functional.silu(a))
    return act * b


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        act = assay.stage("act", a * torch.sigmoid(a))
        ctx.save_for_backward(a, b)
        return act * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        dact = assay.stage("act.grad", g * b)
        da = dact * s * (1 + a * (1 - s))
        db = g * a * s
        return da, db


def kernel(a, b):
    return SwiGLU.apply(a, b)


def target():
    return assay.Target(kernel, golden, cases=[tokens, even, narrow], name="swiglu")
