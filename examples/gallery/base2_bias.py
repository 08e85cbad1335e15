"""Attention with a bias, one query a program and its keys in blocks, in Triton. exp2 stands for exp, and the bias is
not brought to base 2.

After https://github.com/meta-pytorch/segment-anything-fast/pull/71 (zhanglei1172, 2023).
"""

import math

import torch
import triton
import triton.language as tl

from goldsmith import assay

LOG2E = 1 / math.log(2)


# T queries, S keys, D dim
@triton.jit
def _attention(q_ptr, k_ptr, v_ptr, bias_ptr, y_ptr, S, scale, log2e, D: tl.constexpr, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    q = tl.load(q_ptr + row * D + d) * scale * log2e
    top = -float("inf")
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    for start in range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        k = tl.load(k_ptr + s[:, None] * D + d[None, :], s[:, None] < S, 0.0)
        v = tl.load(v_ptr + s[:, None] * D + d[None, :], s[:, None] < S, 0.0)
        bias = tl.load(bias_ptr + row * S + s, s < S, 0.0)
        score = tl.sum(q[None, :] * k, 1) + bias
        score = tl.where(s < S, score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score))
        p = tl.exp2(score - new_top)
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(p)
        acc = acc * decay + tl.sum(p[:, None] * v, 0)
        top = new_top
    tl.store(y_ptr + row * D + d, acc / total)


def attention(q, k, v, bias):
    T, D = q.shape
    q, k, v, bias = (t.contiguous() for t in (q, k, v, bias))
    y = torch.empty_like(q)
    _attention[(T,)](q, k, v, bias, y, len(k), D**-0.5, LOG2E, D=D, BLOCK=8)
    return y


def golden(q, k, v, bias):
    p = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + bias, -1)
    return p @ v


@assay.case(T=[3], S=[8, 13], D=[4])
def queries(make, T, S, D):
    return {"q": make.normal(T, D), "k": make.normal(S, D), "v": make.normal(S, D), "bias": make.normal(T, S)}


target = assay.Target(attention, golden, cases=queries, backward=None, name="base2_bias")
