"""y[t] = sigmoid(r[t]) sum_i p[t, i] v[i], RWKV's time mix: p[t] = softmax of k[i] - (t-1-i) exp(decay), and u + k[t].

Programs go over batch elements and blocks of channels; the state is a numerator, a denominator and the largest exponent
so far. The backward goes from the end with a state of the same kind for what later steps ask of earlier ones.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

BLOCK = 4


@assay.case(B=[2], T=[7], C=[6])
def tokens(make, B, T, C):
    return {
        "r": make.normal(B, T, C), "k": make.normal(B, T, C), "v": make.normal(B, T, C),
        "decay": make.normal(C, std=0.5), "u": make.normal(C),
    }  # fmt: skip


@assay.case(B=[3], T=[4], C=[9])
def narrow(make, B, T, C):
    return tokens[0].draw(make, B, T, C)


def golden(r, k, v, decay, u):
    t = torch.arange(k.shape[1])
    age = (t[:, None] - 1 - t)[:, :, None]
    scores = k[:, None] - age * torch.exp(decay)
    scores = torch.where(age == -1, (k + u)[:, None], scores).masked_fill(age < -1, -math.inf)
    return torch.sigmoid(r) * (torch.softmax(scores, 2) * v[:, None]).sum(2)


def programs(B, C):
    for b in range(B):
        for first in range(0, C, BLOCK):
            yield b, slice(first, min(first + BLOCK, C))


class WKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, k, v, decay, u):
        B, T, C = k.shape
        mixed, lse = torch.empty(B, T, C), torch.empty(B, T, C)
        w = torch.exp(decay)
        for b, c in programs(B, C):
            width = c.stop - c.start
            num, den, top = torch.zeros(width), torch.zeros(width), torch.full((width,), -math.inf)
            for t in range(T):
                now = u[c] + k[b, t, c]
                high = torch.maximum(top, now)
                past, own = torch.exp(top - high), torch.exp(now - high)
                mixed[b, t, c] = (past * num + own * v[b, t, c]) / (past * den + own)
                lse[b, t, c] = high + torch.log(past * den + own)
                high = torch.maximum(top - w[c], k[b, t, c])
                past, own = torch.exp(top - w[c] - high), torch.exp(k[b, t, c] - high)
                num = past * num + own * v[b, t, c]
                den = past * den + own
                top = high
        gate = torch.sigmoid(r)
        ctx.save_for_backward(k, v, w, u, gate, mixed, lse)
        return gate * mixed

    @staticmethod
    def backward(ctx, gy):
        k, v, w, u, gate, mixed, lse = ctx.saved_tensors
        B, T, C = k.shape
        dk, dv = torch.empty(k.shape), torch.empty(v.shape)
        dw, du = torch.zeros(C), torch.zeros(C)
        dr = gy * mixed * gate * (1 - gate)
        for b, c in programs(B, C):
            width = c.stop - c.start
            ask, asked, aged, old = (torch.zeros(width) for _ in range(4))
            top = torch.full((width,), -math.inf)
            for t in reversed(range(T)):
                g = gy[b, t, c] * gate[b, t, c]
                own = torch.exp(u[c] + k[b, t, c] - lse[b, t, c]) * g
                later = torch.exp(k[b, t, c] + top)
                direct = own * (v[b, t, c] - mixed[b, t, c])
                dv[b, t, c] = own + later * ask
                dk[b, t, c] = direct + later * (v[b, t, c] * ask - asked)
                du[c] += direct
                dw[c] -= later * (v[b, t, c] * aged - old)
                high = torch.maximum(top - w[c], -lse[b, t, c])
                keep, new = torch.exp(top - w[c] - high), torch.exp(-lse[b, t, c] - high)
                aged, old = keep * (aged + ask), keep * (old + asked)
                ask = keep * ask + new * g
                asked = keep * asked + new * g * mixed[b, t, c]
                top = high
        return dr, dk, dv, dw * w, du


def kernel(r, k, v, decay, u):
    return WKV.apply(r, k, v, decay, u)


def target():
    return assay.Target(kernel, golden, cases=[tokens, narrow], name="wkv")
