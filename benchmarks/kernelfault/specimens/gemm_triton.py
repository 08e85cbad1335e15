"""y = a b + bias, one tile a program, split over K with atomic additions; float32, also through the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay


@assay.case(M=[6], K=[40], N=[18])
def oblong(make, M, K, N):
    return {"a": make.normal(M, K), "b": make.normal(K, N), "bias": make.normal(N)}


@assay.case(M=[5], K=[33], N=[7])
def odd(make, M, K, N):
    return oblong[0].draw(make, M, K, N)


@assay.case(M=[16], K=[48], N=[16])
def even(make, M, K, N):
    return oblong[0].draw(make, M, K, N)


def golden(a, b, bias):
    product = assay.stage("product", a @ b)
    return product + bias


@triton.jit
def _product_kernel(
    a_ptr, b_ptr, y_ptr, stride_am, stride_ak, stride_bk, stride_bn, M, K, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(part * BLOCK_K, K, SPLIT * BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_mask = (m < M)[:, None] & (k < K)[None, :]
        b_mask = (k < K)[:, None] & (n < N)[None, :]
        a = tl.load(a_ptr + m[:, None] * stride_am + k[None, :] * stride_ak, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * stride_bk + n[None, :] * stride_bn, mask=b_mask, other=0.0)
        acc += tl.dot(a, b, input_precision="ieee")
    y_mask = (m < M)[:, None] & (n < N)[None, :]
    tl.atomic_add(y_ptr + m[:, None] * N + n[None, :], acc, mask=y_mask)


def multiply(a, b):
    M, K, N = *a.shape, b.shape[1]
    y = torch.zeros(M, N, device=a.device)
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 16), 2)
    _product_kernel[grid](a, b, y, *a.stride(), *b.stride(), M, K, N, 16, 16, 16, 2)
    return y


def forward(a, b, bias):
    return assay.stage("product", multiply(a, b)) + bias


def backward(a, b, bias, grad_y):
    return {"a": multiply(grad_y, b.mT), "b": multiply(a.mT, grad_y), "bias": grad_y.sum(0)}


def target():
    return assay.Target(forward, golden, cases=[oblong, odd, even], name="gemm", outputs=("y",), backward=backward)
