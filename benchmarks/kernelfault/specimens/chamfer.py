"""loss[b] = mean over a of the squared distance to the nearest of b + the same from b to a: the chamfer distance.

Clouds have their own numbers of points, what lies behind is no candidate and has no say. Candidates go in tiles with
the nearest so far; which one it was is a decision, and both ends of a pair get the gradient.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

TILE = 4


@assay.case(B=[3], N=[7], M=[9])
def clouds(make, B, N, M):
    size_a, size_b = make.integers(3, N, B), make.integers(4, M, B)
    size_a[0], size_b[B - 1] = N, M
    return {"a": make.normal(B, N, 3), "b": make.normal(B, M, 3), "size_a": size_a, "size_b": size_b}


@assay.case(B=[2], N=[5], M=[6])
def few(make, B, N, M):
    return clouds[0].draw(make, B, N, M)


@assay.case(B=[1], N=[11], M=[5])
def one(make, B, N, M):
    return clouds[0].draw(make, B, N, M)


def golden(a, b, size_a, size_b):
    here_a = torch.arange(a.shape[1]) < size_a.unsqueeze(1)
    here_b = torch.arange(b.shape[1]) < size_b.unsqueeze(1)
    apart = (a.unsqueeze(2) - b.unsqueeze(1)).square().sum(3)
    near_a = assay.stage("near_a", torch.where(here_b.unsqueeze(1), -apart, -math.inf))
    near_b = assay.stage("near_b", torch.where(here_a.unsqueeze(1), -apart.mT, -math.inf))
    index_a, index_b = assay.stage("index_a", near_a.argmax(2)), assay.stage("index_b", near_b.argmax(2))
    from_a = (a - b.gather(1, index_a.unsqueeze(2).expand_as(a))).square().sum(2)
    from_b = (b - a.gather(1, index_b.unsqueeze(2).expand_as(b))).square().sum(2)
    return (from_a * here_a).sum(1) / size_a + (from_b * here_b).sum(1) / size_b, index_a, index_b


def nearest(queries, points, size):
    """Squared distance [B, Q] to the nearest of the first size points, and which one it is."""
    B, Q, _ = queries.shape
    best, index = torch.full((B, Q), math.inf), torch.zeros(B, Q, dtype=torch.int64)
    for p in range(0, points.shape[1], TILE):
        part = points[:, p : p + TILE]
        apart = (queries.unsqueeze(2) - part.unsqueeze(1)).square().sum(3)
        outside = p + torch.arange(part.shape[1]) >= size.unsqueeze(1)
        apart = apart.masked_fill(outside.unsqueeze(1), math.inf)
        least, at = apart.min(2)
        closer = (least < best) | least.isnan()
        best, index = torch.where(closer, least, best), torch.where(closer, p + at, index)
    return best, index


def dense(cloud):
    """The points as a kernel reads them: by the strides of a dense array."""
    cloud, (B, N, C) = cloud.contiguous(), cloud.shape
    return cloud.as_strided((B, N, C), (N * C, C, 1))


class Chamfer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, size_a, size_b):
        a, b = dense(a), dense(b)
        from_a, index_a = nearest(a, b, size_b)
        from_b, index_b = nearest(b, a, size_a)
        index_a, index_b = assay.stage("index_a", index_a), assay.stage("index_b", index_b)
        here_a = torch.arange(a.shape[1]) < size_a.unsqueeze(1)
        here_b = torch.arange(b.shape[1]) < size_b.unsqueeze(1)
        loss = torch.where(here_a, from_a, 0.0).sum(1) / size_a + torch.where(here_b, from_b, 0.0).sum(1) / size_b
        ctx.save_for_backward(a, b, here_a, here_b, index_a, index_b)
        ctx.mark_non_differentiable(index_a, index_b)
        return loss, index_a, index_b

    @staticmethod
    def backward(ctx, g, _a, _b):
        a, b, here_a, here_b, index_a, index_b = ctx.saved_tensors
        da, db = torch.zeros(a.shape), torch.zeros(b.shape)
        for x, y, here, index, dx, dy in ((a, b, here_a, index_a, da, db), (b, a, here_b, index_b, db, da)):
            weight = here * (2 * g / here.sum(1)).unsqueeze(1)
            at = index.unsqueeze(2).expand(-1, -1, 3)
            pull = weight.unsqueeze(2) * (x - y.gather(1, at))
            dx += pull
            dy.scatter_add_(1, at, -pull)
        return da, db, None, None


def kernel(a, b, size_a, size_b):
    return Chamfer.apply(a, b, size_a, size_b)


def target():
    return assay.Target(
        kernel, golden, cases=[clouds, few, one], name="chamfer", outputs=("loss", "index_a", "index_b"),
        decisions={"index_a": assay.argmax(scores="near_a"), "index_b": assay.argmax(scores="near_b")},
    )  # fmt: skip
