"""tau^2 / n sum over kept tokens of sum_v p (log p - log q),  p = softmax(teacher / tau), q = softmax(student / tau).

Distillation over a vocabulary in chunks: a sweep for both logsumexps, a sweep for the divergence, and one for the
student's gradient, which is tau (q - p) / n. Tokens come in tiles that share one workspace.
"""

from __future__ import annotations

import torch

from goldsmith import assay

CHUNK, TILE = 8, 3


@assay.case(T=[7], V=[21])
def tokens(make, T, V):
    return {
        "student": make.normal(T, V), "teacher": make.normal(T, V), "kept": make.permutation(T) > 1, "tau": 2.0,
    }  # fmt: skip


@assay.case(T=[5], V=[12])
def sharp(make, T, V):
    return {**tokens[0].draw(make, T, V), "tau": 0.5}


def golden(student, teacher, kept, tau):
    log_p, log_q = torch.log_softmax(teacher / tau, -1), torch.log_softmax(student / tau, -1)
    each = assay.stage("each", (torch.exp(log_p) * (log_p - log_q)).sum(-1))
    return tau**2 * each[kept].mean()


def tiles(T):
    return [slice(at, min(at + TILE, T)) for at in range(0, T, TILE)]


def chunks(V):
    return [slice(at, min(at + CHUNK, V)) for at in range(0, V, CHUNK)]


def logsumexp(logits, tau, work):
    """Logsumexps of a tile's rows over chunks; `work` holds the running maximum and sum."""
    top, total = work[0, : len(logits)], work[1, : len(logits)]
    top.fill_(-torch.inf)
    total.zero_()
    for now in chunks(logits.shape[1]):
        part = logits[:, now] / tau
        higher = torch.maximum(top, part.amax(1))
        total.mul_(torch.exp(top - higher)).add_(torch.exp(part - higher.unsqueeze(1)).sum(1))
        top.copy_(higher)
    return top + torch.log(total)


class Distil(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student, teacher, kept, tau):
        T, V = student.shape
        lse_s, lse_t, each = torch.empty(T), torch.empty(T), torch.empty(T)
        work = torch.empty(2, TILE)
        for rows in tiles(T):
            lse_s[rows] = logsumexp(student[rows], tau, work)
            lse_t[rows] = logsumexp(teacher[rows], tau, work)
            total = torch.zeros(len(each[rows]))
            for now in chunks(V):
                log_p = teacher[rows, now] / tau - lse_t[rows].unsqueeze(1)
                log_q = student[rows, now] / tau - lse_s[rows].unsqueeze(1)
                total += (torch.exp(log_p) * (log_p - log_q)).sum(1)
            each[rows] = total
        each = assay.stage("each", each)
        ctx.save_for_backward(student, teacher, kept, lse_s, lse_t)
        ctx.tau = tau
        return tau * tau * torch.where(kept, each, 0.0).sum() / kept.sum()

    @staticmethod
    def backward(ctx, g):
        student, teacher, kept, lse_s, lse_t = ctx.saved_tensors
        tau = ctx.tau
        T, V = student.shape
        grad = torch.empty(T, V)
        rate = tau * g / kept.sum()
        for rows in tiles(T):
            for now in chunks(V):
                q = torch.exp(student[rows, now] / tau - lse_s[rows].unsqueeze(1))
                p = torch.exp(teacher[rows, now] / tau - lse_t[rows].unsqueeze(1))
                grad[rows, now] = torch.where(kept[rows].unsqueeze(1), rate * (q - p), 0.0)
        return grad, None, None, None


def kernel(student, teacher, kept, tau):
    return Distil.apply(student, teacher, kept, tau)


def target():
    return assay.Target(
        kernel, golden, cases=[tokens, sharp], name="kl_distill", outputs=("loss",), grads=("student",)
    )  # fmt: skip
