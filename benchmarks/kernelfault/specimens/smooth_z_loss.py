"""loss = mean of lse - (1 - s) x[label] - s mean(x),  z_loss = z mean of lse^2, over rows whose label is not -100.

Cross entropy with label smoothing s and a z-loss, which keeps logits from drifting. Triton, float32: a program has a
row and reads it in blocks, with a running maximum; the sum of logits for the smoothing goes along. The backward reads
the row again and writes the gradient from the row's lse.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK, IGNORED = 16, -100


@assay.case(N=[7], V=[37])
def tokens(make, N, V):
    label = make.integers(0, V, N)
    label[2] = IGNORED
    return {"x": 2 * make.normal(N, V), "label": label, "smoothing": 0.2, "z": 0.3}


@assay.case(N=[4], V=[16])
def strided(make, N, V):
    return {**tokens[0].draw(make, N, V), "x": 3 * make.normal(V, N).T, "smoothing": 0.1, "z": 0.05}


def golden(x, label, smoothing, z):
    kept = label != IGNORED
    lse = assay.stage("lse", torch.logsumexp(x, -1))
    right = x.gather(1, label.clamp(min=0).unsqueeze(1)).squeeze(1)
    rows = lse - (1 - smoothing) * right - smoothing * x.mean(-1)
    return rows[kept].sum() / kept.sum(), z * lse[kept].square().sum() / kept.sum()


@triton.jit
def _fwd_kernel(x_ptr, label_ptr, lse_ptr, loss_ptr, z_ptr, V, stride, n_kept, smoothing, z, IGNORED: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(label_ptr + row)
    x_ptr += row * stride
    top, total, plain = -float("inf"), 0.0, 0.0
    for first in range(0, V, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < V, other=-float("inf"))
        new = tl.maximum(top, tl.max(x))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new))
        plain += tl.sum(tl.where(cols < V, x, 0.0))
        top = new
    lse = top + tl.log(total)
    tl.store(lse_ptr + row, lse)
    if label == IGNORED:
        tl.store(loss_ptr + row, 0.0)
        tl.store(z_ptr + row, 0.0)
    else:
        right = tl.load(x_ptr + label)
        loss = lse - (1.0 - smoothing) * right - smoothing * (plain / V)
        tl.store(loss_ptr + row, loss / n_kept)
        tl.store(z_ptr + row, z * lse * lse / n_kept)


@triton.jit
def _bwd_kernel(x_ptr, label_ptr, lse_ptr, g_ptr, gz_ptr, dx_ptr, V, stride, n_kept, smoothing, z,
                IGNORED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(label_ptr + row)
    if label == IGNORED:
        tl.store(dx_ptr + row * V + cols, tl.zeros([BLOCK], tl.float32), mask=cols < V)
    else:
        g, gz = tl.load(g_ptr) / n_kept, tl.load(gz_ptr) / n_kept
        lse = tl.load(lse_ptr + row)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < V, other=-float("inf"))
        p = tl.exp(x - lse)
        wanted = smoothing / V + tl.where(cols == label, 1.0 - smoothing, 0.0)
        dx = g * (p - wanted) + gz * 2.0 * z * lse * p
        tl.store(dx_ptr + row * V + cols, dx, mask=cols < V)


class SmoothZLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, label, smoothing, z):
        x, label = x if x.stride(-1) == 1 else x.contiguous(), label.contiguous()
        N, V = x.shape
        n_kept = int((label != IGNORED).sum())
        lse, loss, z_loss = (x.new_empty(N) for _ in range(3))
        _fwd_kernel[(N,)](x, label, lse, loss, z_loss, V, x.stride(0), n_kept, smoothing, z, IGNORED, BLOCK)
        lse = assay.stage("lse", lse)
        ctx.save_for_backward(x, label, lse)
        ctx.settings = n_kept, smoothing, z
        return loss.sum(), z_loss.sum()

    @staticmethod
    def backward(ctx, g, gz):
        x, label, lse = ctx.saved_tensors
        N, V = x.shape
        dx = x.new_empty(N, V)
        _bwd_kernel[(N, triton.cdiv(V, BLOCK))](x, label, lse, g, gz, dx, V, x.stride(0), *ctx.settings, IGNORED, BLOCK)
        return dx, None, None, None


def kernel(x, label, smoothing, z):
    return SmoothZLoss.apply(x, label, smoothing, z)


def target():
    return assay.Target(kernel, golden, cases=[tokens, strided], name="smooth_z_loss", outputs=("loss", "z_loss"))
