"""y_t = silu(pre_t),  pre_t = bias + sum_j w[:, j] x_{t-W+1+j}: a causal depthwise convolution over packed sequences.

Before a sequence's first token come the W - 1 columns of its state; the new state is the last W - 1 inputs, filled up
from the old one where the sequence is shorter. Triton, float32: a program has a sequence and a block of channels. The
backward has two kernels: gradients before silu with shares of w and bias, then those of inputs and of the old state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK = 8


@assay.case(B=[4], T=[17], D=[11], W=[4])
def packed(make, B, T, D, W):
    return {
        "x": make.normal(T, D), "w": make.normal(D, W), "bias": make.normal(D), "state": make.normal(B, D, W - 1),
        "offsets": make.offsets(B, T),
    }  # fmt: skip


@assay.case(B=[2], T=[12], D=[8], W=[3])
def pairs(make, B, T, D, W):
    offsets = torch.tensor([0, 1, T], device=make.device)
    return {**packed[0].draw(make, B, T, D, W), "x": make.normal(D, T).T, "offsets": offsets}


def golden(x, w, bias, state, offsets):
    W, y, last = w.shape[1], [], []
    borders = offsets.tolist()
    for b, (begin, end) in enumerate(zip(borders[:-1], borders[1:], strict=True)):
        padded = torch.cat((state[b], x[begin:end].T), 1)
        y.append(sum(w[:, j] * padded[:, j : j + end - begin].T for j in range(W)) + bias)
        last.append(padded[:, end - begin :])
    return torch.nn.functional.silu(assay.stage("pre", torch.cat(y))), torch.stack(last)


@triton.jit
def _fwd_kernel(x_ptr, w_ptr, bias_ptr, state_ptr, offsets_ptr, pre_ptr, y_ptr, last_ptr, D, W: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    b = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = d < D
    begin, end = tl.load(offsets_ptr + b), tl.load(offsets_ptr + b + 1)
    bias = tl.load(bias_ptr + d, mask=m, other=0.0)
    state_ptr += (b * D + d) * (W - 1)
    for t in range(begin, end):
        pre = bias
        for j in tl.static_range(W):
            past = t - (W - 1) + j
            if past >= begin:
                x = tl.load(x_ptr + past * D + d, mask=m, other=0.0)
            else:
                x = tl.load(state_ptr + past - begin + W - 1, mask=m, other=0.0)
            pre += x * tl.load(w_ptr + d * W + j, mask=m, other=0.0)
        tl.store(pre_ptr + t * D + d, pre, mask=m)
        tl.store(y_ptr + t * D + d, pre * tl.sigmoid(pre), mask=m)
    for j in tl.static_range(W - 1):
        past = end - (W - 1) + j
        if past >= begin:
            x = tl.load(x_ptr + past * D + d, mask=m, other=0.0)
        else:
            x = tl.load(state_ptr + past - begin + W - 1, mask=m, other=0.0)
        tl.store(last_ptr + (b * D + d) * (W - 1) + j, x, mask=m)


@triton.jit
def _bwd_pre_kernel(x_ptr, w_ptr, state_ptr, offsets_ptr, pre_ptr, g_ptr, dpre_ptr, dw_ptr, dbias_ptr, D,
                    W: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    b = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = d < D
    begin, end = tl.load(offsets_ptr + b), tl.load(offsets_ptr + b + 1)
    state_ptr += (b * D + d) * (W - 1)
    dbias = tl.zeros([BLOCK], tl.float32)
    for t in range(begin, end):
        pre = tl.load(pre_ptr + t * D + d, mask=m, other=0.0)
        sig = tl.sigmoid(pre)
        dpre = tl.load(g_ptr + t * D + d, mask=m, other=0.0) * sig * (1.0 + pre * (1.0 - sig))
        tl.store(dpre_ptr + t * D + d, dpre, mask=m)
        dbias += dpre
    tl.store(dbias_ptr + b * D + d, dbias, mask=m)
    for j in tl.static_range(W):
        dw = tl.zeros([BLOCK], tl.float32)
        for t in range(begin, end):
            past = t - (W - 1) + j
            if past >= begin:
                x = tl.load(x_ptr + past * D + d, mask=m, other=0.0)
            else:
                x = tl.load(state_ptr + past - begin + W - 1, mask=m, other=0.0)
            dw += x * tl.load(dpre_ptr + t * D + d, mask=m, other=0.0)
        tl.store(dw_ptr + (b * D + d) * W + j, dw, mask=m)


@triton.jit
def _bwd_input_kernel(w_ptr, offsets_ptr, dpre_ptr, glast_ptr, dx_ptr, dstate_ptr, D, W: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    b = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = d < D
    begin, end = tl.load(offsets_ptr + b), tl.load(offsets_ptr + b + 1)
    for at in range(begin - (W - 1), end):
        dx = tl.zeros([BLOCK], tl.float32)
        for j in tl.static_range(W):
            t = at + (W - 1) - j
            if t >= begin and t < end:
                w = tl.load(w_ptr + d * W + j, mask=m, other=0.0)
                dx += w * tl.load(dpre_ptr + t * D + d, mask=m, other=0.0)
        kept = at - (end - (W - 1))
        if kept >= 0:
            dx += tl.load(glast_ptr + (b * D + d) * (W - 1) + kept, mask=m, other=0.0)
        if at >= begin:
            tl.store(dx_ptr + at * D + d, dx, mask=m)
        else:
            tl.store(dstate_ptr + (b * D + d) * (W - 1) + at - begin + W - 1, dx, mask=m)


class ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias, state, offsets):
        x, w, bias, state, offsets = (t.contiguous() for t in (x, w, bias, state, offsets))
        B, D, W = state.shape[0], *w.shape
        pre, y, last = torch.empty_like(x), torch.empty_like(x), torch.empty_like(state)
        _fwd_kernel[(B, triton.cdiv(D, BLOCK))](x, w, bias, state, offsets, pre, y, last, D, W, BLOCK)
        pre = assay.stage("pre", pre)
        ctx.save_for_backward(x, w, state, offsets, pre)
        return y, last

    @staticmethod
    def backward(ctx, g, glast):
        x, w, state, offsets, pre = ctx.saved_tensors
        B, D, W = state.shape[0], *w.shape
        g, glast = g.contiguous(), glast.contiguous()
        dx, dpre, dstate = torch.empty_like(x), torch.empty_like(pre), torch.empty_like(state)
        dw, dbias = x.new_empty(B, D, W), x.new_empty(B, D)
        grid = B, triton.cdiv(D, BLOCK)
        _bwd_pre_kernel[grid](x, w, state, offsets, pre, g, dpre, dw, dbias, D, W, BLOCK)
        _bwd_input_kernel[grid](w, offsets, dpre, glast, dx, dstate, D, W, BLOCK)
        return dx, dw.sum(0), dbias.sum(0), dstate, None


def kernel(x, w, bias, state, offsets):
    return ShortConv.apply(x, w, bias, state, offsets)


def target():
    return assay.Target(kernel, golden, cases=[packed, pairs], name="short_conv", outputs=("y", "last"))
