"""softmax(q k^T / sqrt(D)) v of one new token, the cache in 4 bits: old keys and values are codes, the newest are not.

Keys have a scale and a zero for each channel and group of G tokens, values for each token and group of W channels. A
byte holds two channels, the lower one in its low bits. Programs go over heads and groups of tokens, the newest last.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

G, W = 4, 2


@assay.case(H=[3], T=[10], N=[3], D=[6])
def cached(make, H, T, N, D):
    return {
        "q": make.normal(H, D),
        "k_codes": make.integers(0, 256, H, T, D // 2, dtype=torch.uint8),
        "k_scale": make.uniform(H, -(-T // G), D) * 0.3, "k_zero": make.uniform(H, -(-T // G), D) * 15,
        "v_codes": make.integers(0, 256, H, T, D // 2, dtype=torch.uint8),
        "v_scale": make.uniform(H, T, D // W) * 0.3, "v_zero": make.uniform(H, T, D // W) * 15,
        "k_new": make.normal(H, N, D), "v_new": make.normal(H, N, D),
    }  # fmt: skip


@assay.case(H=[2], T=[13], N=[1], D=[4])
def last(make, H, T, N, D):
    return cached[0].draw(make, H, T, N, D)


def golden(q, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, k_new, v_new):
    T = k_codes.shape[1]
    codes_k, codes_v = (torch.stack([c % 16, c // 16], -1).flatten(-2) for c in (k_codes, v_codes))
    scale_k, zero_k = (t.repeat_interleave(G, 1)[:, :T] for t in (k_scale, k_zero))
    scale_v, zero_v = (t.repeat_interleave(W, 2) for t in (v_scale, v_zero))
    k = torch.cat([(codes_k - zero_k) * scale_k, k_new], 1)
    v = torch.cat([(codes_v - zero_v) * scale_v, v_new], 1)
    scores = torch.einsum("hd,htd->ht", q, k) / math.sqrt(q.shape[1])
    return torch.einsum("ht,htd->hd", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)


def unpacked(codes):
    """[t, D / 2] bytes to [t, D] numbers of 4 bits."""
    out = torch.empty(codes.shape[0], codes.shape[1] * 2)
    out[:, 0::2] = (codes & 0xF).float()
    out[:, 1::2] = (codes >> 4).float()
    return out


def taken(state, scores, values):
    """The running maximum, sum and weighted values with one more block."""
    top, total, acc = state
    higher = torch.maximum(top, scores.amax())
    shift = torch.where(higher == -math.inf, 0.0, higher)
    e, keep = torch.exp(scores - shift), torch.exp(top - shift)
    return higher, total * keep + e.sum(), acc * keep + e @ values


def decode(q, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, k_new, v_new):
    H, D = q.shape
    T = k_codes.shape[1]
    y, lse = torch.empty(H, D), torch.empty(H)
    for h in range(H):
        scaled = q[h] * D**-0.5
        state = torch.tensor(-math.inf), torch.zeros(()), torch.zeros(D)
        for group in range(-(-T // G)):
            tokens = slice(group * G, min(group * G + G, T))
            keys = (unpacked(k_codes[h, tokens]) - k_zero[h, group]) * k_scale[h, group]
            scale = v_scale[h, tokens].repeat_interleave(W, 1)
            zero = v_zero[h, tokens].repeat_interleave(W, 1)
            values = (unpacked(v_codes[h, tokens]) - zero) * scale
            state = taken(state, keys @ scaled, values)
        top, total, acc = taken(state, k_new[h] @ scaled, v_new[h])
        y[h] = acc / total
        lse[h] = top + torch.log(total)
    return y, lse


def target():
    return assay.Target(
        decode, golden, cases=[cached, last], name="quantised_cache", outputs=("y", "lse"), backward=None
    )
