"""y_i = 1 / max(1, degree_i) sum over edges (j, i) of feat_j filter(|pos_i - pos_j|): SchNet's convolution.

filter(d) = (sum_k exp(-(d - c_k)^2 / width^2) w_k) (1 + cos(pi d / reach)) / 2 for d < reach, else 0, with centres
c_k from 0 to reach. Edges come in tiles; what they send is added by index to its atom, and so are the gradients of
positions.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

TILE = 4


@assay.case(N=[6], E=[14], F=[3], K=[4])
def atoms(make, N, E, F, K):
    source = make.integers(0, N, E)
    goal = (source + make.integers(1, N - 1, E)) % N
    source, goal = source[goal != N - 1], goal[goal != N - 1]  # the last atom has no edge that ends there
    source, goal = torch.cat([source, torch.tensor([0, 2, 4])]), torch.cat([goal, torch.tensor([1, 1, 0])])
    return {
        "pos": make.normal(N, 3), "feat": make.normal(N, F), "w": make.normal(K, F), "source": source, "goal": goal,
        "reach": 2.8, "width": 0.6,
    }  # fmt: skip


@assay.case(N=[4], E=[7], F=[5], K=[3])
def few(make, N, E, F, K):
    return {**atoms[0].draw(make, N, E, F, K), "source": torch.tensor([0, 1, 2, 3, 3, 0]),
            "goal": torch.tensor([1, 2, 1, 1, 0, 2]), "reach": 3.5, "width": 1.0}  # fmt: skip


def golden(pos, feat, w, source, goal, reach, width):
    d = assay.stage("d", (pos[goal] - pos[source]).square().sum(1, keepdim=True).sqrt())
    centre = torch.arange(len(w)) * (reach / (len(w) - 1))
    radial = assay.stage("radial", torch.exp(-(((d - centre) / width) ** 2)))
    fade = torch.where(d < reach, (1 + torch.cos(d * (math.pi / reach))) / 2, 0.0)
    filt = assay.stage("filter", radial @ w * fade)
    degree = torch.bincount(goal, minlength=len(pos)).clamp(min=1).unsqueeze(1)
    return torch.zeros_like(feat).index_add(0, goal, feat[source] * filt) / degree


def tiles(E):
    return [slice(at, min(at + TILE, E)) for at in range(0, E, TILE)]


class CFConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pos, feat, w, source, goal, reach, width):
        E, (N, F), K = len(source), feat.shape, len(w)
        d, radial, filt = torch.empty(E, 1), torch.empty(E, K), torch.empty(E, F)
        centre = torch.arange(K) * (reach / (K - 1))
        for now in tiles(E):
            apart = pos[goal[now]] - pos[source[now]]
            d[now] = torch.sqrt((apart * apart).sum(1, keepdim=True))
        d = assay.stage("d", d)
        for now in tiles(E):
            radial[now] = torch.exp(-(((d[now] - centre) / width) ** 2))
        radial = assay.stage("radial", radial)
        for now in tiles(E):
            fade = torch.where(d[now] < reach, 0.5 * (torch.cos(d[now] * (math.pi / reach)) + 1), 0.0)
            filt[now] = (radial[now] @ w) * fade
        filt = assay.stage("filter", filt)
        y, degree = torch.zeros(N, F), torch.zeros(N, 1)
        for now in tiles(E):
            y.index_add_(0, goal[now], feat[source[now]] * filt[now])
            degree.index_add_(0, goal[now], torch.ones(len(goal[now]), 1))
        degree = degree.clamp(min=1)
        ctx.save_for_backward(pos, feat, w, source, goal, d, radial, filt, degree)
        ctx.reach, ctx.width = reach, width
        return y / degree

    @staticmethod
    def backward(ctx, g):
        pos, feat, w, source, goal, d, radial, filt, degree = ctx.saved_tensors
        reach, width = ctx.reach, ctx.width
        centre = torch.arange(len(w)) * (reach / (len(w) - 1))
        dpos, dfeat, dw = torch.zeros(pos.shape), torch.zeros(feat.shape), torch.zeros(w.shape)
        g = g / degree
        for now in tiles(len(source)):
            from_, to = source[now], goal[now]
            dfeat.index_add_(0, from_, g[to] * filt[now])
            dfilt = g[to] * feat[from_]
            angle = d[now] * (math.pi / reach)
            near = d[now] < reach
            fade = torch.where(near, 0.5 * (torch.cos(angle) + 1), 0.0)
            dw += radial[now].mT @ (dfilt * fade)
            dradial = (dfilt * fade) @ w.mT
            dfade = (dfilt * (radial[now] @ w)).sum(1, keepdim=True)
            dd = (dradial * radial[now] * (-2 / width**2) * (d[now] - centre)).sum(1, keepdim=True)
            dd += torch.where(near, dfade * (-0.5 * math.pi / reach) * torch.sin(angle), 0.0)
            pull = dd * ((pos[to] - pos[from_]) / d[now])
            dpos.index_add_(0, to, pull)
            dpos.index_add_(0, from_, -pull)
        return dpos, dfeat, dw, None, None, None, None


def kernel(pos, feat, w, source, goal, reach, width):
    return CFConv.apply(pos, feat, w, source, goal, reach, width)


def target():
    return assay.Target(kernel, golden, cases=[atoms, few], name="cfconv", outputs=("y",))
