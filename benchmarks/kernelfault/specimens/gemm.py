"""y = a b + bias in tiles, and its backward in the same tiles; strides are read from the tensors."""

from __future__ import annotations

import torch

from goldsmith import assay

BLOCK = 32


@assay.case(M=[24], K=[80], N=[20])
def oblong(make, M, K, N):
    return {"a": make.normal(M, K), "b": make.normal(K, N), "bias": make.normal(N)}


@assay.case(M=[33], K=[65], N=[7])
def odd(make, M, K, N):
    return oblong[0].draw(make, M, K, N)


@assay.case(M=[40], K=[40], N=[40])
def square(make, M, K, N):
    return oblong[0].draw(make, M, K, N)


def golden(a, b, bias):
    product = assay.stage("product", a @ b)
    return product + bias


def tile(t, row, column):
    """A tile by the tensor's strides, as a kernel would load it."""
    rows, columns = min(BLOCK, t.shape[0] - row), min(BLOCK, t.shape[1] - column)
    start = t.storage_offset() + row * t.stride(0) + column * t.stride(1)
    return torch.as_strided(t, (rows, columns), t.stride(), start)


def multiply(a, b):
    M, K, N = *a.shape, b.shape[1]
    y = torch.empty(M, N)
    for m in range(0, M, BLOCK):
        for n in range(0, N, BLOCK):
            acc = torch.zeros(min(BLOCK, M - m), min(BLOCK, N - n))
            for k in range(0, K, BLOCK):
                acc += tile(a, m, k) @ tile(b, k, n)
            y[m : m + BLOCK, n : n + BLOCK] = acc
    return y


def forward(a, b, bias):
    return assay.stage("product", multiply(a, b)) + bias


def backward(a, b, bias, grad_y):
    g = grad_y
    da = multiply(g, b.mT)
    db = multiply(a.mT, g)
    return {"a": da, "b": db, "bias": g.sum(0)}


def target():
    return assay.Target(forward, golden, cases=[oblong, odd, square], name="gemm", outputs=("y",), backward=backward)
