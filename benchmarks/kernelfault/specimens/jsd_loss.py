"""mean over labelled tokens of beta KL(p | m) + (1 - beta) KL(q | m),  m = beta p + (1 - beta) q.

q = softmax(student / tau), p = softmax(teacher / tau): the generalised Jensen-Shannon divergence of a distillation. In
Triton, float32: a program has one token and walks over the vocabulary in blocks three times (logsumexps, loss, gradient
of the student). The forward keeps the gradient; the backward multiplies it by the loss' own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK = 16
IGNORED = -100


@assay.case(T=[7], V=[37])
def tokens(make, T, V):
    label = make.integers(0, V, T)
    label[make.permutation(T)[:2]] = IGNORED
    return {
        "student": make.normal(T, V, std=2.0), "teacher": make.normal(T, V, std=2.0), "label": label, "beta": 0.3,
        "tau": 1.5,
    }  # fmt: skip


@assay.case(T=[5], V=[50])
def wide(make, T, V):
    return {**tokens[0].draw(make, T, V), "beta": 0.75, "tau": 0.8}


def golden(student, teacher, label, beta, tau):
    log_q, log_p = torch.log_softmax(student / tau, -1), torch.log_softmax(teacher / tau, -1)
    p, q = log_p.exp(), log_q.exp()
    log_m = torch.log(beta * p + (1 - beta) * q)
    losses = (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1)
    return losses[label != IGNORED].mean()


@triton.jit
def _jsd_kernel(x_ptr, y_ptr, label_ptr, loss_ptr, dx_ptr, stride_xt, stride_yt, V, beta, tau, valid, IGNORED,
                BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    x_ptr += row * stride_xt
    y_ptr += row * stride_yt
    dx_ptr += row * V
    label = tl.load(label_ptr + row)
    v = tl.arange(0, BLOCK)
    if label == IGNORED:
        tl.store(loss_ptr + row, 0.0)
        for start in range(0, V, BLOCK):
            tl.store(dx_ptr + start + v, tl.zeros([BLOCK], tl.float32), mask=start + v < V)
        return

    max_x, sum_x = -float("inf"), 0.0
    max_y, sum_y = -float("inf"), 0.0
    for start in range(0, V, BLOCK):
        inside = start + v < V
        x = tl.load(x_ptr + start + v, mask=inside, other=-float("inf")) / tau
        y = tl.load(y_ptr + start + v, mask=inside, other=-float("inf")) / tau
        new_x = tl.maximum(max_x, tl.max(x, 0))
        new_y = tl.maximum(max_y, tl.max(y, 0))
        sum_x = sum_x * tl.exp(max_x - new_x) + tl.sum(tl.exp(x - new_x), 0)
        sum_y = sum_y * tl.exp(max_y - new_y) + tl.sum(tl.exp(y - new_y), 0)
        max_x, max_y = new_x, new_y
    lse_x = max_x + tl.log(sum_x)
    lse_y = max_y + tl.log(sum_y)

    loss, inner = 0.0, 0.0
    for start in range(0, V, BLOCK):
        inside = start + v < V
        log_q = tl.load(x_ptr + start + v, mask=inside, other=0.0) / tau - lse_x
        log_p = tl.load(y_ptr + start + v, mask=inside, other=0.0) / tau - lse_y
        q, p = tl.exp(log_q), tl.exp(log_p)
        log_m = tl.log(beta * p + (1 - beta) * q)
        each = beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)
        dlog_q = (1 - beta) * q * (log_q - log_m)
        loss += tl.sum(tl.where(inside, each, 0.0), 0)
        inner += tl.sum(tl.where(inside, dlog_q, 0.0), 0)
        tl.store(dx_ptr + start + v, dlog_q, mask=inside)
    tl.store(loss_ptr + row, loss / valid)

    for start in range(0, V, BLOCK):
        inside = start + v < V
        q = tl.exp(tl.load(x_ptr + start + v, mask=inside, other=0.0) / tau - lse_x)
        dlog_q = tl.load(dx_ptr + start + v, mask=inside, other=0.0)
        tl.store(dx_ptr + start + v, (dlog_q - q * inner) / (valid * tau), mask=inside)


@triton.jit
def _scale_kernel(dx_ptr, g_ptr, out_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    g = tl.load(g_ptr)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        dx = tl.load(dx_ptr + row * V + v, mask=v < V, other=0.0)
        tl.store(out_ptr + row * V + v, dx * g, mask=v < V)


class JSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student, teacher, label, beta, tau):
        T, V = student.shape
        student = student if student.stride(1) == 1 else student.contiguous()
        teacher = teacher if teacher.stride(1) == 1 else teacher.contiguous()
        valid = int((label != IGNORED).sum())
        losses, dx = student.new_empty(T), student.new_empty(T, V)
        _jsd_kernel[(T,)](
            student, teacher, label.contiguous(), losses, dx, student.stride(0), teacher.stride(0), V, beta, tau,
            valid, IGNORED, BLOCK,
        )  # fmt: skip
        ctx.save_for_backward(dx)
        return losses.sum()

    @staticmethod
    def backward(ctx, grad):
        (dx,) = ctx.saved_tensors
        out = torch.empty_like(dx)
        _scale_kernel[(len(dx),)](dx, grad.contiguous(), out, dx.shape[1], BLOCK)
        return out, None, None, None, None


def kernel(student, teacher, label, beta, tau):
    return JSD.apply(student, teacher, label, beta, tau)


def target():
    return assay.Target(
        kernel, golden, cases=[tokens, wide], name="jsd_loss", outputs=("loss",), grads=("student",)
    )  # fmt: skip
