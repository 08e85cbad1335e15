"""loss[b] = -log of the sum over all ways through the lattice of frames and labels: the transducer's loss (RNN-T).

Logits are [B, T, U + 1, V], blank is 0, frames and labels have lengths of their own. The logsumexp over V is online in
tiles; alphas go by diagonals; the backward lets what reaches the end flow back by the shares of both ways in, and
forms the softmax again.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

TILE = 4


@assay.case(B=[2], T=[4], U=[2], V=[6])
def batch(make, B, T, U, V):
    frames, labels = torch.full((B,), T), torch.full((B,), U)
    frames[0], labels[-1] = T - 1, U - 1
    return {
        "logits": make.normal(B, T, U + 1, V), "targets": make.integers(1, V, B, U), "frames": frames, "labels": labels,
    }  # fmt: skip


@assay.case(B=[3], T=[3], U=[2], V=[5])
def short(make, B, T, U, V):
    drawn = batch[0].draw(make, B, T, U, V)
    return {**drawn, "frames": torch.tensor([2, 3, 1]), "labels": torch.tensor([2, 0, 1])}


@assay.case(B=[1], T=[5], U=[3], V=[7])
def one(make, B, T, U, V):
    return {**batch[0].draw(make, B, T, U, V), "frames": torch.tensor([4]), "labels": torch.tensor([3])}


def golden(logits, targets, frames, labels):
    losses = []
    for b in range(len(logits)):
        T, U = int(frames[b]), int(labels[b])
        logp = torch.log_softmax(logits[b, :T, : U + 1], -1)
        blank = logp[:, :, 0]
        label = logp[:, :U].gather(2, targets[b, :U].expand(T, U).unsqueeze(2)).squeeze(2)
        alpha = {(0, 0): blank[0, 0] * 0}
        for t in range(T):
            for u in range(U + 1):
                ways = [alpha[t - 1, u] + blank[t - 1, u]] if t else []
                ways += [alpha[t, u - 1] + label[t, u - 1]] if u else []
                if ways:
                    alpha[t, u] = torch.logaddexp(*ways) if len(ways) == 2 else ways[0]
        losses.append(-(alpha[T - 1, U] + blank[T - 1, U]))
    return torch.stack(losses)


def diagonal(d, T, U):
    """Cells with t + u = d."""
    u = torch.arange(max(0, d - T + 1), min(U, d) + 1)
    return d - u, u


class RNNT(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, frames, labels):
        B, T, cells, V = logits.shape
        U, b = cells - 1, torch.arange(B)
        top, total = torch.full((B, T, cells), -math.inf), torch.zeros(B, T, cells)
        for v in range(0, V, TILE):
            part = logits[..., v : v + TILE]
            higher = torch.maximum(top, part.amax(-1))
            total = total * torch.exp(top - higher) + torch.exp(part - higher.unsqueeze(-1)).sum(-1)
            top = higher
        lse = top + torch.log(total)
        blank = logits[..., 0] - lse
        index = targets.unsqueeze(1).expand(B, T, U).unsqueeze(3)
        label = logits[:, :, :U].gather(3, index).squeeze(3) - lse[:, :, :U]
        alpha = torch.full((B, T, cells), -math.inf)
        alpha[:, 0, 0] = 0
        for d in range(1, T + U):
            t, u = diagonal(d, T, U)
            stay = torch.where(t > 0, alpha[:, t - 1, u] + blank[:, t - 1, u], -math.inf)
            emit = torch.full(stay.shape, -math.inf)
            emit[:, u > 0] = alpha[:, t, u - 1][:, u > 0] + label[:, t[u > 0], u[u > 0] - 1]
            alpha[:, t, u] = torch.logaddexp(stay, emit)
        ctx.save_for_backward(logits, index, frames, labels, lse, blank, label, alpha)
        return -(alpha[b, frames - 1, labels] + blank[b, frames - 1, labels])

    @staticmethod
    def backward(ctx, g):
        logits, index, frames, labels, lse, blank, label, alpha = ctx.saved_tensors
        B, T, cells, V = logits.shape
        U, b = cells - 1, torch.arange(B)
        inside = (torch.arange(T).unsqueeze(1) < frames.view(B, 1, 1)) & (torch.arange(cells) <= labels.view(B, 1, 1))
        by_blank, by_label = torch.zeros(B, T, cells), torch.zeros(B, T, cells)
        by_blank[b, frames - 1, labels] = 1
        flow = by_blank.clone()
        for d in reversed(range(T + U - 1)):
            t, u = diagonal(d, T, U)
            down, right = t + 1 < T, u < U
            ts, us = t[down], u[down]
            share = flow[:, ts + 1, us] * torch.exp(alpha[:, ts, us] + blank[:, ts, us] - alpha[:, ts + 1, us])
            by_blank[:, ts, us] += torch.where(inside[:, ts + 1, us], share, 0.0)
            ts, us = t[right], u[right]
            share = flow[:, ts, us + 1] * torch.exp(alpha[:, ts, us] + label[:, ts, us] - alpha[:, ts, us + 1])
            by_label[:, ts, us] = torch.where(inside[:, ts, us + 1], share, 0.0)
            flow[:, t, u] = by_blank[:, t, u] + by_label[:, t, u]
        slope = flow.unsqueeze(3) * torch.exp(logits - lse.unsqueeze(3))
        slope[..., 0] -= by_blank
        slope[:, :, :U].scatter_add_(3, index, -by_label[:, :, :U].unsqueeze(3))
        dlogits = torch.zeros(B, T, cells, V)
        dlogits[inside] = (slope * g.view(B, 1, 1, 1))[inside]
        return dlogits, None, None, None


def kernel(logits, targets, frames, labels):
    return RNNT.apply(logits, targets, frames, labels)


def target():
    return assay.Target(kernel, golden, cases=[batch, short, one], name="rnnt_loss", outputs=("loss",))
