"""loss[b] = -log sum over alignments of prod_t p[b, t, symbol]: connectionist temporal classification, blank = 0.

A target's labels stand between blanks; alpha goes over them from the start and beta from the end, both in logarithms.
Inputs and targets are padded and have lengths of their own.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay


@assay.case(B=[3], T=[8], V=[5], L=[3])
def words(make, B, T, V, L):
    return {
        "logits": make.normal(B, T, V), "labels": make.integers(1, V, B, L), "frames": make.integers(2 * L, T + 1, B),
        "lengths": make.integers(1, L + 1, B),
    }  # fmt: skip


@assay.case(B=[4], T=[6], V=[3], L=[2])
def few(make, B, T, V, L):
    """Of two symbols beside the blank: labels are repeated."""
    return words[0].draw(make, B, T, V, L)


def golden(logits, labels, frames, lengths):
    log_p, losses = assay.stage("log_p", torch.log_softmax(logits, -1)), []
    for b in range(len(logits)):
        p = log_p[b]
        states = [0] + [s for label in labels[b, : lengths[b]].tolist() for s in (label, 0)]
        alpha = {0: p[0, states[0]], 1: p[0, states[1]]}
        for t in range(1, int(frames[b])):
            after = {}
            for s, symbol in enumerate(states):
                skips = s > 1 and symbol != 0 and symbol != states[s - 2]
                ways = [alpha[r] for r in (s, s - 1, s - 2)[: 3 if skips else 2] if r in alpha]
                if ways:
                    after[s] = torch.logsumexp(torch.stack(ways), 0) + p[t, symbol]
            alpha = after
        ends = [alpha[s] for s in (len(states) - 1, len(states) - 2) if s in alpha]
        losses.append(-torch.logsumexp(torch.stack(ends), 0))
    return torch.stack(losses)


def spread(labels, length):
    """The labels between blanks, and which states may be reached past the one before."""
    states = torch.zeros(2 * length + 1, dtype=torch.int64)
    states[1::2] = labels[:length]
    skips = torch.zeros(len(states), dtype=torch.bool)
    skips[2:] = (states[2:] != 0) & (states[2:] != states[:-2])
    return states, skips


def shifted(row, by):
    """The row moved to the right, or to the left where by < 0."""
    moved = torch.full(row.shape, -math.inf)
    if by > 0:
        moved[by:] = row[:-by]
    else:
        moved[:by] = row[-by:]
    return moved


def joined(*rows):
    """log sum exp of rows, of which some are minus infinity in all."""
    stacked = torch.stack(rows)
    top = stacked.amax(0)
    top = torch.where(top == -math.inf, 0.0, top)
    return top + torch.log(torch.exp(stacked - top).sum(0))


def closed(row, opened):
    return torch.where(opened, row, -math.inf)


class CTC(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, frames, lengths):
        B, T, V = logits.shape
        loss = torch.empty(B)
        alphas = torch.full((B, T, 2 * labels.shape[1] + 1), -math.inf)
        e = logits - logits.amax(-1, keepdim=True)
        log_p = assay.stage("log_p", e - torch.log(torch.exp(e).sum(-1, keepdim=True)))
        for b in range(B):
            states, skips = spread(labels[b], int(lengths[b]))
            S, last = len(states), int(frames[b]) - 1
            alpha = alphas[b, :, :S]
            alpha[0, :2] = log_p[b, 0, states[:2]]
            for t in range(1, last + 1):
                before = alpha[t - 1]
                ways = joined(before, shifted(before, 1), closed(shifted(before, 2), skips))
                alpha[t] = ways + log_p[b, t, states]
            loss[b] = -joined(alpha[last, S - 1], alpha[last, S - 2])
        ctx.save_for_backward(labels, frames, lengths, loss, log_p, alphas)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        labels, frames, lengths, loss, log_p, alphas = ctx.saved_tensors
        B, T, V = log_p.shape
        dlogits = torch.zeros(B, T, V)
        for b in range(B):
            states, skips = spread(labels[b], int(lengths[b]))
            S, last = len(states), int(frames[b]) - 1
            leaps = torch.zeros(S, dtype=torch.bool)
            leaps[:-2] = skips[2:]
            beta = torch.full((S,), -math.inf)
            beta[S - 2 :] = 0.0
            for t in reversed(range(last + 1)):
                posterior = torch.exp(alphas[b, t, :S] + beta + loss[b])
                of_symbol = torch.zeros(V).index_add_(0, states, posterior)
                dlogits[b, t] = (torch.exp(log_p[b, t]) - of_symbol) * grad_loss[b]
                said = beta + log_p[b, t, states]
                beta = joined(said, shifted(said, -1), closed(shifted(said, -2), leaps))
        return dlogits, None, None, None


def kernel(logits, labels, frames, lengths):
    return CTC.apply(logits, labels, frames, lengths)


def target():
    return assay.Target(kernel, golden, cases=[words, few], name="ctc_loss", outputs=("loss",))
