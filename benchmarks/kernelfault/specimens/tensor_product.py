"""y[n] = sum over edges e to n of CG(w[e], x[from e], sh[e]): an equivariant convolution with degrees 0 and 1.

Channels of x and y have a scalar and a vector side by side, sh is the edge's scalar and direction. Five paths (0 x 0,
1 . 1, 0 x 1, 1 x 0 and the cross product) have a weight for each edge and channel. Edges are sorted by the node that
they go to and taken in tiles; the products come from a list of the nonzero Clebsch-Gordan coefficients.
"""

from __future__ import annotations

import torch

from goldsmith import assay

TILE, PATHS = 4, 5
DOT, CROSS = 3**-0.5, 2**-0.5


@assay.case(N=[5], E=[11], U=[3])
def graph(make, N, E, U):
    return {
        "x": make.normal(N, U, 4), "sh": make.normal(E, 4), "w": make.normal(E, PATHS, U),
        "source": make.integers(0, N, E), "goal": make.integers(0, N, E),
    }  # fmt: skip


@assay.case(N=[3], E=[9], U=[2])
def dense(make, N, E, U):
    return graph[0].draw(make, N, E, U)


@assay.case(N=[7], E=[6], U=[5])
def sparse(make, N, E, U):
    return graph[0].draw(make, N, E, U)


def golden(x, sh, w, source, goal):
    v = x[source]
    scalar, vector = v[..., 0], v[..., 1:]
    s, d = sh[:, None, 0], sh[:, None, 1:]
    w0, w1, w2, w3, w4 = w.unbind(1)
    out = w0 * scalar * s + w1 * DOT * (vector * d).sum(2)
    outer = (w2 * scalar).unsqueeze(2) * d + (w3 * s).unsqueeze(2) * vector
    cross = torch.linalg.cross(vector, d.expand_as(vector)) * CROSS
    message = torch.cat([out.unsqueeze(2), outer + w4.unsqueeze(2) * cross], 2)
    return torch.zeros_like(x).index_add(0, goal, message)


def entries():
    """(path, component of x, of sh, of y, coefficient) of all products that are not zero."""
    found = [(0, 0, 0, 0, 1.0)]
    for i in (1, 2, 3):
        found += [(1, i, i, 0, DOT), (2, 0, i, i, 1.0), (3, i, 0, i, 1.0)]
    for a, b, c in ((1, 2, 3), (2, 3, 1), (3, 1, 2)):
        found += [(4, a, b, c, CROSS), (4, b, a, c, -CROSS)]
    return found


ENTRIES = entries()


def by_goal(goal):
    return torch.argsort(goal, stable=True)


def tiles(E):
    return [slice(at, min(at + TILE, E)) for at in range(0, E, TILE)]


class TensorProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sh, w, source, goal):
        order = by_goal(goal)
        y = torch.zeros(x.shape)
        for part in tiles(len(goal)):
            edges = order[part]
            v, s, weight = x[source[edges]], sh[edges], w[edges]
            message = torch.zeros(v.shape)
            for path, i, j, k, c in ENTRIES:
                message[:, :, k] += c * weight[:, path] * v[:, :, i] * s[:, j : j + 1]
            y.index_add_(0, goal[edges], message)
        ctx.save_for_backward(x, sh, w, source, goal, order)
        return y

    @staticmethod
    def backward(ctx, g):
        x, sh, w, source, goal, order = ctx.saved_tensors
        dx, dsh, dw = torch.zeros(x.shape), torch.empty(sh.shape), torch.empty(w.shape)
        for part in tiles(len(goal)):
            edges = order[part]
            v, s, weight, grad = x[source[edges]], sh[edges], w[edges], g[goal[edges]]
            dv, ds, dweight = torch.zeros(v.shape), torch.zeros(s.shape), torch.zeros(weight.shape)
            for path, i, j, k, c in ENTRIES:
                along = c * grad[:, :, k]
                dv[:, :, i] += along * weight[:, path] * s[:, j : j + 1]
                ds[:, j] += (along * weight[:, path] * v[:, :, i]).sum(1)
                dweight[:, path] += along * v[:, :, i] * s[:, j : j + 1]
            dx.index_add_(0, source[edges], dv)
            dsh[edges], dw[edges] = ds, dweight
        return dx, dsh, dw, None, None


def kernel(x, sh, w, source, goal):
    return TensorProduct.apply(x, sh, w, source, goal)


def target():
    return assay.Target(kernel, golden, cases=[graph, dense, sparse], name="tensor_product", outputs=("y",))
