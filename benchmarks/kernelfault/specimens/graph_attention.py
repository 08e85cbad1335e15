"""y[n] = sum over edges m -> n of softmax_m(leaky_relu(s[m] + d[n])) x[m]: graph attention, a softmax in each segment.

Edges come in any order; sums over a node's edges are scattered. A node without edges gets zeros.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from goldsmith import assay

SLOPE = 0.2


@assay.case(N=[9], E=[31], H=[2], D=[4])
def graph(make, N, E, H, D):
    return {
        "x": make.normal(N, H, D), "s": make.normal(N, H), "d": make.normal(N, H), "source": make.integers(0, N, E),
        "node": make.integers(0, N, E),
    }  # fmt: skip


@assay.case(N=[12], E=[17], H=[3], D=[2])
def sparse(make, N, E, H, D):
    """The last three nodes have no edges."""
    return {**graph[0].draw(make, N, E, H, D), "node": make.integers(0, N - 3, E)}


def golden(x, s, d, source, node):
    scores = F.leaky_relu(s[source] + d[node], SLOPE)
    y = torch.zeros_like(x)
    for n in node.unique():
        mine = node == n
        weights = torch.softmax(scores[mine], 0)
        y[n] = (weights.unsqueeze(-1) * x[source[mine]]).sum(0)
    return y


class GraphAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s, d, source, node):
        N, H, D = x.shape
        places = node.unsqueeze(1).expand(-1, H)
        raw = s[source] + d[node]
        scores = torch.where(raw > 0, raw, SLOPE * raw)
        top = torch.full((N, H), -math.inf).scatter_reduce_(0, places, scores, "amax")
        e = torch.exp(scores - top[node])
        total = torch.zeros(N, H)
        total.index_add_(0, node, e)
        weights = e / total[node]
        y = torch.zeros(N, H, D)
        y.index_add_(0, node, weights.unsqueeze(2) * x[source])
        ctx.save_for_backward(x, raw, weights, source, node)
        return y

    @staticmethod
    def backward(ctx, g):
        x, raw, weights, source, node = ctx.saved_tensors
        N, H, D = x.shape
        dx = torch.zeros(N, H, D)
        dx.index_add_(0, source, weights.unsqueeze(2) * g[node])
        dweights = (g[node] * x[source]).sum(2)
        inner = torch.zeros(N, H).index_add_(0, node, weights * dweights)
        dscores = weights * (dweights - inner[node])
        draw = torch.where(raw > 0, dscores, SLOPE * dscores)
        ds = torch.zeros(N, H).index_add_(0, source, draw)
        dd = torch.zeros(N, H).index_add_(0, node, draw)
        return dx, ds, dd, None, None


def kernel(x, s, d, source, node):
    return GraphAttention.apply(x, s, d, source, node)


def target():
    return assay.Target(kernel, golden, cases=[graph, sparse], name="graph_attention")
