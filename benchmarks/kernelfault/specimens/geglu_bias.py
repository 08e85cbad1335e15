"""y = (up + b_up) gelu(gate + b_gate) with h = [gate | up] packed in rows, forward and backward in Triton.

gelu(z) is z sigmoid(2 u) with u = sqrt(2 / pi) (z + 0.044715 z^3). The backward forms it again; each block of rows
leaves its sum for the bias in a workspace, and the blocks are summed at the end. Float32, also in the interpreter.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from goldsmith import assay

ROWS, COLUMNS = 4, 16


@assay.case(T=[11], F=[20])
def tokens(make, T, F):
    return {"h": make.normal(T, 2 * F), "bias": make.normal(2 * F)}


@assay.case(T=[6], F=[33])
def wide(make, T, F):
    return tokens[0].draw(make, T, F)


def golden(h, bias):
    gate, up = (h + bias).chunk(2, -1)
    u = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return up * (gate * torch.sigmoid(2 * u))


@triton.jit
def _forward(h_ptr, bias_ptr, y_ptr, T, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (t < T) & (f < F)
    gate = tl.load(h_ptr + t * 2 * F + f, mask=inside, other=0.0) + tl.load(bias_ptr + f, mask=f < F, other=0.0)
    up = tl.load(h_ptr + t * 2 * F + F + f, mask=inside, other=0.0) + tl.load(bias_ptr + F + f, mask=f < F, other=0.0)
    u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    tl.store(y_ptr + t * F + f, up * gate * tl.sigmoid(2 * u), mask=inside)


@triton.jit
def _backward(g_ptr, h_ptr, bias_ptr, dh_ptr, part_ptr, T, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (t < T) & (f < F)
    g = tl.load(g_ptr + t * F + f, mask=inside, other=0.0)
    b_gate, b_up = tl.load(bias_ptr + f, mask=f < F, other=0.0), tl.load(bias_ptr + F + f, mask=f < F, other=0.0)
    gate = tl.load(h_ptr + t * 2 * F + f, mask=inside, other=0.0) + b_gate
    up = tl.load(h_ptr + t * 2 * F + F + f, mask=inside, other=0.0) + b_up
    s = tl.sigmoid(2 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
    bend = 0.7978845608028654 * (1 + 3 * 0.044715 * gate * gate)
    dgate = g * up * (s + 2 * gate * s * (1 - s) * bend)
    dup = g * gate * s
    tl.store(dh_ptr + t * 2 * F + f, dgate, mask=inside)
    tl.store(dh_ptr + t * 2 * F + F + f, dup, mask=inside)
    part = part_ptr + tl.program_id(0) * 2 * F + f
    tl.store(part, tl.sum(dgate, axis=0, keep_dims=True), mask=f < F)
    tl.store(part + F, tl.sum(dup, axis=0, keep_dims=True), mask=f < F)


class GEGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, bias):
        h, bias = h.contiguous(), bias.contiguous()
        T, F = h.shape[0], h.shape[1] // 2
        y = h.new_empty(T, F)
        _forward[(triton.cdiv(T, ROWS), triton.cdiv(F, COLUMNS))](h, bias, y, T, F, ROWS, COLUMNS)
        ctx.save_for_backward(h, bias)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        h, bias = ctx.saved_tensors
        T, F = grad_y.shape
        blocks = triton.cdiv(T, ROWS)
        dh, part = torch.empty_like(h), h.new_empty(blocks, 2 * F)
        _backward[(blocks, triton.cdiv(F, COLUMNS))](
            grad_y.contiguous(), h, bias, dh, part, T, F, ROWS, COLUMNS
        )  # fmt: skip
        return dh, part.sum(0)


def kernel(h, bias):
    return GEGLU.apply(h, bias)


def target():
    return assay.Target(kernel, golden, cases=[tokens, wide], name="geglu_bias", outputs=("y",))
