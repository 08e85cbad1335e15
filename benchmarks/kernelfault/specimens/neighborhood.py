"""y = softmax(q k D^-1/2 + bias[offset]) v over the K x K nearest keys of an image: neighborhood attention (NATTEN).

At the borders the window is pushed inside, so that every query has K x K keys. Rows of a window go online; lse is
saved, the backward forms the weights again, and gradients of keys, values and the table are added by index.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay


@assay.case(A=[2], H=[5], W=[4], D=[3], K=[3])
def images(make, A, H, W, D, K):
    return {
        "q": make.normal(A, H, W, D), "k": make.normal(A, H, W, D), "v": make.normal(A, H, W, D),
        "bias": make.normal(A, 2 * K - 1, 2 * K - 1), "K": K,
    }  # fmt: skip


@assay.case(A=[1], H=[3], W=[7], D=[5], K=[3])
def wide(make, A, H, W, D, K):
    return images[0].draw(make, A, H, W, D, K)


@assay.case(A=[3], H=[4], W=[3], D=[6], K=[2])
def even(make, A, H, W, D, K):
    return images[0].draw(make, A, H, W, D, K)


def golden(q, k, v, bias, K):
    _, H, W, D = q.shape
    i, j = torch.arange(H), torch.arange(W)
    row = (i - K // 2).clamp(0, H - K).unsqueeze(1) + torch.arange(K)
    column = (j - K // 2).clamp(0, W - K).unsqueeze(1) + torch.arange(K)

    def near(x):  # [A, H, W, K, K, D]
        return x[:, row][:, :, :, column].transpose(2, 3)

    scores = assay.stage("scores", (q[:, :, :, None, None] * near(k)).sum(-1) * D**-0.5)
    down, right = row - i.unsqueeze(1) + K - 1, column - j.unsqueeze(1) + K - 1
    logits = scores + bias[:, down[:, None, :, None], right[None, :, None, :]]
    lse = torch.logsumexp(logits.flatten(3), 3)
    p = torch.softmax(logits.flatten(3), 3).unflatten(3, (K, K))
    return (p.unsqueeze(-1) * near(v)).sum((3, 4)), lse


def first(n, K):
    """Where each query's window begins."""
    return torch.clamp(torch.arange(n) - K // 2, 0, n - K)


def places(H, W, K, a, b):
    """Of each query, the flat place of key (a, b) of its window, and the flat place in the table."""
    row, column = first(H, K) + a, first(W, K) + b
    down, right = row - torch.arange(H) + K - 1, column - torch.arange(W) + K - 1
    return (row.unsqueeze(1) * W + column).flatten(), (down.unsqueeze(1) * (2 * K - 1) + right).flatten()


class Neighborhood(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, K):
        A, H, W, D = q.shape
        scale = D**-0.5
        qs, ks, vs = (x.reshape(A, H * W, D) for x in (q, k, v))
        table = bias.reshape(A, -1)
        scores = torch.empty(A, H * W, K, K)
        window = [[places(H, W, K, a, b) for b in range(K)] for a in range(K)]
        for a in range(K):
            for b in range(K):
                scores[:, :, a, b] = (qs * ks[:, window[a][b][0]]).sum(-1) * scale
        scores = assay.stage("scores", scores.view(A, H, W, K, K)).reshape(A, H * W, K, K)
        top, total = torch.full((A, H * W), -math.inf), torch.zeros(A, H * W)
        acc = torch.zeros(A, H * W, D)
        for a in range(K):
            logits = torch.stack([scores[:, :, a, b] + table[:, window[a][b][1]] for b in range(K)], 2)
            higher = torch.maximum(top, logits.amax(2))
            shrink, p = torch.exp(top - higher), torch.exp(logits - higher.unsqueeze(2))
            total = total * shrink + p.sum(2)
            acc = acc * shrink.unsqueeze(2)
            for b in range(K):
                acc = acc + p[:, :, b : b + 1] * vs[:, window[a][b][0]]
            top = higher
        y, lse = acc / total.unsqueeze(2), top + torch.log(total)
        ctx.save_for_backward(qs, ks, vs, table, scores, y, lse)
        ctx.sizes, ctx.scale, ctx.window = (A, H, W, D, K), scale, window
        lse = lse.view(A, H, W)
        ctx.mark_non_differentiable(lse)
        return y.view(A, H, W, D), lse

    @staticmethod
    def backward(ctx, g, _):
        qs, ks, vs, table, scores, y, lse = ctx.saved_tensors
        A, H, W, D, K = ctx.sizes
        g = g.reshape(A, H * W, D)
        dq, dk, dv = torch.zeros(qs.shape), torch.zeros(qs.shape), torch.zeros(qs.shape)
        dtable = torch.zeros(table.shape)
        delta = (g * y).sum(-1)
        for a in range(K):
            for b in range(K):
                key, offset = ctx.window[a][b]
                p = torch.exp(scores[:, :, a, b] + table[:, offset] - lse)
                ds = p * ((g * vs[:, key]).sum(-1) - delta)
                dtable.index_add_(1, offset, ds)
                ds = (ds * ctx.scale).unsqueeze(2)
                dq += ds * ks[:, key]
                dk.index_add_(1, key, ds * qs)
                dv.index_add_(1, key, p.unsqueeze(2) * g)
        shape = (A, H, W, D)
        return dq.view(shape), dk.view(shape), dv.view(shape), dtable.view(A, 2 * K - 1, -1), None


def kernel(q, k, v, bias, K):
    return Neighborhood.apply(q, k, v, bias, K)


def target():
    return assay.Target(
        kernel, golden, cases=[images, wide, even], name="neighborhood", outputs=("y", "lse"), saved=("lse",)
    )  # fmt: skip
