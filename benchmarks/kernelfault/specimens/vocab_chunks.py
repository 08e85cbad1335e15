"""mean over tokens of the smoothed cross entropy of x w^T, the vocabulary in blocks: logits are never held as a whole.

Each block brings its maximum and its sum to a running logsumexp. The backward forms every block's logits again. The
last block is filled up with rows of zeros, as kernels with a fixed block have it.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from goldsmith import assay

BLOCK = 8


@assay.case(T=[9], V=[21], D=[6])
def tokens(make, T, V, D):
    return {"x": make.normal(T, D), "w": make.normal(V, D), "label": make.integers(0, V, T), "smooth": 0.1}


@assay.case(T=[5], V=[30], D=[4])
def wide(make, T, V, D):
    return tokens[0].draw(make, T, V, D)


def golden(x, w, label, smooth):
    return F.cross_entropy(x @ w.T, label, label_smoothing=smooth)


def block_of(w, at):
    """BLOCK rows of w from `at` on, zeros where it ends."""
    rows = w[at : at + BLOCK]
    return F.pad(rows, (0, 0, 0, BLOCK - len(rows)))


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, label, smooth):
        T, V = len(x), len(w)
        top, total = torch.full((T,), -math.inf), torch.zeros(T)
        right, every = torch.zeros(T), torch.zeros(T)
        for at in range(0, V, BLOCK):
            logits = x @ block_of(w, at).mT
            column = torch.arange(at, at + BLOCK)
            exists = column < V
            right += (logits * (column == label.unsqueeze(1))).sum(1)
            every += logits.sum(1)
            logits = logits.masked_fill(~exists, -math.inf)
            higher = torch.maximum(top, logits.amax(1))
            total = total * torch.exp(top - higher) + torch.exp(logits - higher.unsqueeze(1)).sum(1)
            top = higher
        lse = top + torch.log(total)
        ctx.save_for_backward(x, w, label, lse)
        ctx.smooth = smooth
        losses = lse - (1 - smooth) * right - smooth / V * every
        return losses.mean()

    @staticmethod
    def backward(ctx, g):
        x, w, label, lse = ctx.saved_tensors
        T, V, smooth = len(x), len(w), ctx.smooth
        dx, dw = torch.zeros(x.shape), torch.empty(w.shape)
        for at in range(0, V, BLOCK):
            rows = block_of(w, at)
            column = torch.arange(at, at + BLOCK)
            p = torch.exp(x @ rows.mT - lse.unsqueeze(1))
            p -= smooth / V
            p -= (1 - smooth) * (column == label.unsqueeze(1))
            dlogits = p * (g / T)
            dx += dlogits @ rows
            dw[at : at + BLOCK] = (dlogits.mT @ x)[: V - at]
        return dx, dw, None, None


def kernel(x, w, label, smooth):
    return Loss.apply(x, w, label, smooth)


def target():
    return assay.Target(kernel, golden, cases=[tokens, wide], name="vocab_chunks")
