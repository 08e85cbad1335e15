"""loss = mean_b -(1 - eps) log sigmoid(m_b) - eps log sigmoid(-m_b),  m = beta (logp[b] - logp[B + b] - reference's).

Direct preference optimisation from logits: rows 0..B-1 are chosen answers, rows B..2B-1 the rejected ones. The logits
at place t predict the label at t + 1, and negative labels do not count. Triton, float32: a program has a place and
walks over the vocabulary; a second kernel adds up places, a third one writes the logits' gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

WORDS, PLACES = 16, 4


@assay.case(B=[2], T=[7], V=[37])
def pairs(make, B, T, V):
    labels = make.integers(0, V, 2 * B, T)
    ignored = make.integers(0, 4, 2 * B, T) == 0
    return {
        "logits": make.normal(2 * B, T, V, std=2.0), "labels": labels.masked_fill(ignored, -100),
        "reference": -20 + 4 * make.normal(2 * B), "beta": 0.3, "smoothing": 0.1,
    }  # fmt: skip


@assay.case(B=[3], T=[5], V=[16])
def prompted(make, B, T, V):
    drawn = pairs[0].draw(make, B, T, V)
    drawn["labels"][:, :2] = -100
    return {**drawn, "logits": make.normal(T, 2 * B, V).transpose(0, 1), "beta": 0.1}


def golden(logits, labels, reference, beta, smoothing):
    B = len(logits) // 2
    following = labels[:, 1:]
    words = torch.log_softmax(logits[:, :-1], -1)
    picked = words.gather(-1, following.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    logp = assay.stage("logp", picked.masked_fill(following < 0, 0.0).sum(-1))
    margin = beta * ((logp[:B] - logp[B:]) - (reference[:B] - reference[B:]))
    softplus = torch.nn.functional.softplus
    return ((1 - smoothing) * softplus(-margin) + smoothing * softplus(margin)).mean()


@triton.jit
def _word_kernel(x_ptr, label_ptr, word_ptr, lse_ptr, sxb, sxt, sxv, T, V, WORDS: tl.constexpr):
    b, t = tl.program_id(0), tl.program_id(1)
    x_ptr += b * sxb + t * sxt
    top, total = -float("inf"), 0.0
    for start in range(0, V, WORDS):
        v = start + tl.arange(0, WORDS)
        x = tl.load(x_ptr + v * sxv, mask=v < V, other=-float("inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    lse = top + tl.log(total)
    label = tl.load(label_ptr + b * T + t + 1)
    counts = label >= 0
    picked = tl.load(x_ptr + label * sxv, mask=counts, other=0.0)
    at = b * (T - 1) + t
    tl.store(word_ptr + at, tl.where(counts, picked - lse, 0.0))
    tl.store(lse_ptr + at, lse)


@triton.jit
def _row_kernel(word_ptr, logp_ptr, N, PLACES: tl.constexpr):
    b = tl.program_id(0)
    acc = tl.zeros([PLACES], tl.float32)
    for start in range(0, N, PLACES):
        t = start + tl.arange(0, PLACES)
        acc += tl.load(word_ptr + b * N + t, mask=t < N, other=0.0)
    tl.store(logp_ptr + b, tl.sum(acc, 0))


@triton.jit
def _grad_kernel(x_ptr, label_ptr, lse_ptr, drow_ptr, dx_ptr, sxb, sxt, sxv, T, V, WORDS: tl.constexpr):
    b, t = tl.program_id(0), tl.program_id(1)
    x_ptr += b * sxb + t * sxt
    predicts = t + 1 < T
    label = tl.load(label_ptr + b * T + t + 1, mask=predicts, other=-1)
    lse = tl.load(lse_ptr + b * (T - 1) + t, mask=predicts, other=0.0)
    rate = tl.where(label >= 0, tl.load(drow_ptr + b), 0.0)
    for start in range(0, V, WORDS):
        v = start + tl.arange(0, WORDS)
        x = tl.load(x_ptr + v * sxv, mask=v < V, other=-float("inf"))
        p = tl.where(predicts, tl.exp(x - lse), 0.0)
        tl.store(dx_ptr + (b * T + t) * V + v, rate * ((v == label).to(tl.float32) - p), mask=v < V)


class DPOLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, reference, beta, smoothing):
        rows, T, V = logits.shape
        B = rows // 2
        labels = labels.contiguous()
        words, lse = logits.new_empty(rows, T - 1), logits.new_empty(rows, T - 1)
        logp = logits.new_empty(rows)
        _word_kernel[(rows, T - 1)](logits, labels, words, lse, *logits.stride(), T, V, WORDS)
        _row_kernel[(rows,)](words, logp, T - 1, PLACES)
        logp = assay.stage("logp", logp)
        chosen, rejected = logp[:B], logp[B:]
        margin = beta * ((chosen - rejected) - (reference[:B] - reference[B:]))
        ctx.save_for_backward(logits, labels, lse, margin)
        ctx.beta, ctx.smoothing = beta, smoothing
        softplus = torch.nn.functional.softplus
        return ((1 - smoothing) * softplus(-margin) + smoothing * softplus(margin)).mean()

    @staticmethod
    def backward(ctx, g):
        logits, labels, lse, margin = ctx.saved_tensors
        rows, T, V = logits.shape
        slope = ctx.smoothing * torch.sigmoid(margin) - (1 - ctx.smoothing) * torch.sigmoid(-margin)
        dlogp = g * ctx.beta * slope / len(margin)
        drow = torch.cat([dlogp, -dlogp])
        dlogits = logits.new_empty(rows, T, V)
        _grad_kernel[(rows, T)](logits, labels, lse, drow, dlogits, *logits.stride(), T, V, WORDS)
        return dlogits, None, None, None, None


def kernel(logits, labels, reference, beta, smoothing):
    return DPOLoss.apply(logits, labels, reference, beta, smoothing)


def target():
    return assay.Target(
        kernel, golden, cases=[pairs, prompted], name="dpo_loss", outputs=("loss",), grads=("logits",)
    )  # fmt: skip
