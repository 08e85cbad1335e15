"""y = x * mask / (1 - p): the mask comes from a seed, and the backward draws it again from the same seed."""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(T=[32], D=[64])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "p": 0.25, "seed": 17}


@assay.case(T=[9], D=[100])
def odd(make, T, D):
    return tokens[0].draw(make, T, D)


@assay.case(T=[64], D=[20])
def narrow(make, T, D):
    return tokens[0].draw(make, T, D)


def kept(x, p, seed):
    return (torch.rand(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) >= p).to(x.dtype)


def golden(x, p, seed):
    mask = assay.stage("mask", kept(x, p, seed))
    return x * mask / (1 - p)


def forward(x, p, seed):
    mask = assay.stage("mask", kept(x, p, seed))
    return x * mask * (1 / (1 - p))


def backward(x, p, seed, grad_y):
    mask = kept(x, p, seed)
    return {"x": grad_y * mask / (1 - p)}


def target():
    return assay.Target(
        forward, golden, cases=[tokens, odd, narrow], name="dropout", outputs=("y",), backward=backward,
        decisions={"mask": assay.given(rate="p")},
    )  # fmt: skip
