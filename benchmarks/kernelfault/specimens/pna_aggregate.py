"""y_n = [a, log(deg_n + 1) / delta a] for a in (mean, max, min, std) of x over the neighbours of node n.

Principal neighbourhood aggregation of a graph in CSR form: four aggregators with and without the scaler of degrees.
Triton, float32: a program per node and block of features walks over the node's edges, twice for the deviation. The
backward sends each node's gradients along its edges with atomic adds. A node without neighbours has zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK_F = 4
EPS = 1e-2


@assay.case(N=[7], F=[6], E=[15])
def graph(make, N, F, E):
    return {"x": make.normal(N, F), "rowptr": make.offsets(N, E), "col": make.integers(0, N, E), "delta": 1.2}


@assay.case(N=[4], F=[4], E=[7])
def offset_features(make, N, F, E):
    return {**graph[0].draw(make, N, F, E), "x": 2 + make.normal(F, N).T, "delta": 0.7}


def golden(x, rowptr, col, delta):
    mean, std, high, low = [], [], [], []
    for n in range(len(rowptr) - 1):
        rows = x[col[rowptr[n] : rowptr[n + 1]]]
        if len(rows) == 0:
            rows = torch.zeros_like(x[:1])
            mean.append(rows[0])
            std.append(rows[0])
            high.append(rows[0])
            low.append(rows[0])
            continue
        mean.append(rows.mean(0))
        std.append(torch.sqrt((rows - rows.mean(0)).square().mean(0) + EPS))
        high.append(rows.max(0).values)
        low.append(rows.min(0).values)
    mean, std = assay.stage("mean", torch.stack(mean)), assay.stage("std", torch.stack(std))
    parts = torch.stack((mean, torch.stack(high), torch.stack(low), std), 1)
    amplifier = torch.log((rowptr[1:] - rowptr[:-1]).to(x.dtype) + 1) / delta
    return torch.cat((parts, parts * amplifier[:, None, None]), 1)


# n node, f features, e edges
@triton.jit
def _fwd_kernel(x_ptr, rowptr_ptr, col_ptr, y_ptr, mean_ptr, std_ptr, high_ptr, low_ptr, F, delta, eps,
                BLOCK_F: tl.constexpr):  # fmt: skip
    n = tl.program_id(0)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    m = f < F
    start, end = tl.load(rowptr_ptr + n), tl.load(rowptr_ptr + n + 1)
    degree = (end - start).to(tl.float32)
    total = tl.zeros([BLOCK_F], tl.float32)
    high = tl.full([BLOCK_F], -float("inf"), tl.float32)
    low = tl.full([BLOCK_F], float("inf"), tl.float32)
    high_at = tl.full([BLOCK_F], -1, tl.int64)
    low_at = tl.full([BLOCK_F], -1, tl.int64)
    for e in range(start, end):
        source = tl.load(col_ptr + e)
        x = tl.load(x_ptr + source * F + f, mask=m, other=0.0)
        total += x
        high_at = tl.where(x > high, e, high_at)
        high = tl.maximum(high, x)
        low_at = tl.where(x < low, e, low_at)
        low = tl.minimum(low, x)
    count = tl.maximum(degree, 1.0)
    mean = total / count
    squares = tl.zeros([BLOCK_F], tl.float32)
    for e in range(start, end):
        source = tl.load(col_ptr + e)
        x = tl.load(x_ptr + source * F + f, mask=m, other=0.0)
        squares += (x - mean) * (x - mean)
    some = end > start
    std = tl.where(some, tl.sqrt(squares / count + eps), 0.0)
    high = tl.where(some, high, 0.0)
    low = tl.where(some, low, 0.0)
    amplifier = tl.log(degree + 1.0) / delta
    out = y_ptr + n * 8 * F + f
    tl.store(out, mean, mask=m)
    tl.store(out + F, high, mask=m)
    tl.store(out + 2 * F, low, mask=m)
    tl.store(out + 3 * F, std, mask=m)
    tl.store(out + 4 * F, mean * amplifier, mask=m)
    tl.store(out + 5 * F, high * amplifier, mask=m)
    tl.store(out + 6 * F, low * amplifier, mask=m)
    tl.store(out + 7 * F, std * amplifier, mask=m)
    tl.store(mean_ptr + n * F + f, mean, mask=m)
    tl.store(std_ptr + n * F + f, std, mask=m)
    tl.store(high_ptr + n * F + f, high_at, mask=m)
    tl.store(low_ptr + n * F + f, low_at, mask=m)


@triton.jit
def _both(g_ptr, F, amplifier, part: tl.constexpr, m):
    """The gradient of an aggregate: of itself, and of itself with the scaler."""
    plain = tl.load(g_ptr + part * F, mask=m, other=0.0)
    return plain + tl.load(g_ptr + (4 + part) * F, mask=m, other=0.0) * amplifier


@triton.jit
def _bwd_kernel(g_ptr, x_ptr, rowptr_ptr, col_ptr, mean_ptr, std_ptr, high_ptr, low_ptr, dx_ptr, F, delta,
                BLOCK_F: tl.constexpr):  # fmt: skip
    n = tl.program_id(0)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    m = f < F
    start, end = tl.load(rowptr_ptr + n), tl.load(rowptr_ptr + n + 1)
    if end > start:
        degree = (end - start).to(tl.float32)
        amplifier = tl.log(degree + 1.0) / delta
        rows = g_ptr + n * 8 * F + f
        d_mean = _both(rows, F, amplifier, 0, m) / degree
        d_high = _both(rows, F, amplifier, 1, m)
        d_low = _both(rows, F, amplifier, 2, m)
        d_std = _both(rows, F, amplifier, 3, m)
        mean = tl.load(mean_ptr + n * F + f, mask=m, other=0.0)
        std = tl.load(std_ptr + n * F + f, mask=m, other=1.0)
        high_at = tl.load(high_ptr + n * F + f, mask=m, other=-1)
        low_at = tl.load(low_ptr + n * F + f, mask=m, other=-1)
        for e in range(start, end):
            source = tl.load(col_ptr + e)
            x = tl.load(x_ptr + source * F + f, mask=m, other=0.0)
            dx = d_mean + d_std * (x - mean) / (std * degree)
            dx += tl.where(high_at == e, d_high, 0.0)
            dx += tl.where(low_at == e, d_low, 0.0)
            tl.atomic_add(dx_ptr + source * F + f, dx, mask=m)


class PNAAggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rowptr, col, delta):
        x, rowptr, col = x.contiguous(), rowptr.contiguous(), col.contiguous()
        nodes, F = len(rowptr) - 1, x.shape[1]
        y = x.new_empty(nodes, 8, F)
        mean, std = x.new_empty(nodes, F), x.new_empty(nodes, F)
        high_at, low_at = col.new_empty(nodes, F), col.new_empty(nodes, F)
        grid = (nodes, triton.cdiv(F, BLOCK_F))
        _fwd_kernel[grid](x, rowptr, col, y, mean, std, high_at, low_at, F, delta, EPS, BLOCK_F)
        mean, std = assay.stage("mean", mean), assay.stage("std", std)
        ctx.save_for_backward(x, rowptr, col, mean, std, high_at, low_at)
        ctx.delta = delta
        return y

    @staticmethod
    def backward(ctx, g):
        x, rowptr, col, mean, std, high_at, low_at = ctx.saved_tensors
        (nodes, _, F), g = g.shape, g.contiguous()
        dx = torch.zeros_like(x)
        grid = (nodes, triton.cdiv(F, BLOCK_F))
        _bwd_kernel[grid](g, x, rowptr, col, mean, std, high_at, low_at, dx, F, ctx.delta, BLOCK_F)
        return dx, None, None, None


def kernel(x, rowptr, col, delta):
    return PNAAggregate.apply(x, rowptr, col, delta)


def target():
    cases = [graph, offset_features]
    return assay.Target(kernel, golden, cases=cases, name="pna_aggregate", outputs=("y",), finite=("x",))
