"""loss = mean over sequences of the mean over their answer's rows of KL(student || teacher), times heat^2.

On-policy distillation of packed sequences: student logits are hidden @ w.T, both sides are divided by heat, and rows of
prompts are masked out. Plain torch: the projection and the loss go through chunks of rows, so that logits of all rows
never exist at once; the gradients are formed in the forward and only scaled by the backward.
"""

from __future__ import annotations

import torch

from goldsmith import assay

CHUNK = 4


@assay.case(B=[3], N=[14], D=[6], V=[9])
def packed(make, B, N, D, V):
    offsets = make.offsets(B, N)
    answer = make.integers(0, 3, N) > 0
    answer[offsets[1:] - 1] = True  # a sequence ends with its answer
    return {
        "hidden": make.normal(N, D), "w": make.normal(V, D), "teacher": 2 * make.normal(N, V),
        "answer": answer, "offsets": offsets, "heat": 1.5,
    }  # fmt: skip


@assay.case(B=[4], N=[8], D=[5], V=[7])
def views(make, B, N, D, V):
    return {**packed[0].draw(make, B, N, D, V), "hidden": make.normal(D, N).T, "heat": 0.8}


def golden(hidden, w, teacher, answer, offsets, heat):
    student = torch.log_softmax(hidden @ w.T / heat, -1)
    wanted = torch.log_softmax(teacher / heat, -1)
    rows = assay.stage("rows", (student.exp() * (student - wanted)).sum(-1) * answer)
    means = []
    borders = offsets.tolist()
    for begin, end in zip(borders[:-1], borders[1:], strict=True):
        kept = answer[begin:end].sum()
        if kept > 0:
            means.append(rows[begin:end].sum() / kept)
    return heat**2 * torch.stack(means).mean()


def row_weights(answer, offsets):
    """Each row's share of the loss: 1 / (answered sequences * rows of its own answer), 0 for a prompt's row."""
    length = offsets[1:] - offsets[:-1]
    sequence = torch.repeat_interleave(torch.arange(length.shape[0], device=length.device), length)
    kept = torch.zeros_like(length).index_add_(0, sequence, answer.to(length.dtype))
    return answer / (kept[sequence].clamp(min=1) * (kept > 0).sum())


class ReverseKLLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, w, teacher, answer, offsets, heat):
        N = hidden.shape[0]
        weight = row_weights(answer, offsets).to(hidden.dtype)
        rows = hidden.new_empty(N)
        dhidden, dw = torch.empty_like(hidden), torch.zeros_like(w)
        for first in range(0, N, CHUNK):
            chunk = slice(first, min(first + CHUNK, N))
            logits = hidden[chunk] @ w.T / heat
            student = logits - torch.logsumexp(logits, -1, keepdim=True)
            wanted = torch.log_softmax(teacher[chunk] / heat, dim=-1)
            p = torch.exp(student)
            ratio = student - wanted
            divergence = (p * ratio).sum(-1, keepdim=True)
            rows[chunk] = divergence.squeeze(-1) * answer[chunk]
            dlogits = p * (ratio - divergence) * weight[chunk].unsqueeze(-1) * heat
            dhidden[chunk] = dlogits @ w
            dw += dlogits.T @ hidden[chunk]
        rows = assay.stage("rows", rows)
        ctx.save_for_backward(dhidden, dw)
        return heat**2 * (rows * weight).sum()

    @staticmethod
    def backward(ctx, g):
        dhidden, dw = ctx.saved_tensors
        return g * dhidden, g * dw, None, None, None, None


def kernel(hidden, w, teacher, answer, offsets, heat):
    return ReverseKLLinear.apply(hidden, w, teacher, answer, offsets, heat)


def target():
    return assay.Target(
        kernel, golden, cases=[packed, views], name="reverse_kl_linear", outputs=("loss",), grads=("hidden", "w")
    )
