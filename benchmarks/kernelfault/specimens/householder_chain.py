"""y = H_R ... H_1 x,  H_r x = x - b_r (u_r . x) u_r,  u_r = w_r / |w_r|,  b_r = 2 sigmoid(tau_r).

A product of gated Householder maps, which linear attention with products of updates and orthogonal fine-tuning apply
to each row: the vectors w are shared, the gates tau are each row's own. Triton, float32: one kernel normalises the
vectors, one takes a block of rows through the maps and keeps every state. The backward goes back through the maps,
leaves each block's share of the vectors' gradient in a table, and a last kernel sums it and takes it through the norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK_N = 4


@assay.case(N=[7], D=[6], R=[3])
def rows(make, N, D, R):
    return {"x": make.normal(N, D), "w": 2 * make.normal(R, D), "tau": make.normal(N, R)}


@assay.case(N=[10], D=[8], R=[2])
def columns_first(make, N, D, R):
    return {"x": make.normal(D, N).T, "w": 0.5 * make.normal(R, D), "tau": make.normal(R, N).T}


def golden(x, w, tau):
    u = assay.stage("u", w / torch.linalg.vector_norm(w, dim=-1, keepdim=True))
    b = 2 * torch.sigmoid(tau)
    for r in range(w.shape[0]):
        x = x - b[:, r, None] * (x @ u[r])[:, None] * u[r]
    return x


# n row, r map, d dim
@triton.jit
def _norm_kernel(w_ptr, u_ptr, inv_norm_ptr, D, BLOCK_D: tl.constexpr):
    r, d = tl.program_id(0), tl.arange(0, BLOCK_D)
    w = tl.load(w_ptr + r * D + d, mask=d < D, other=0.0)
    inv_norm = 1.0 / tl.sqrt(tl.sum(w * w))
    tl.store(u_ptr + r * D + d, w * inv_norm, mask=d < D)
    tl.store(inv_norm_ptr + r, inv_norm)


@triton.jit
def _fwd_kernel(x_ptr, u_ptr, tau_ptr, states_ptr, y_ptr, N, D, R, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    n, d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    at = n[:, None] * D + d[None, :]
    m = (n[:, None] < N) & (d[None, :] < D)
    x = tl.load(x_ptr + at, mask=m, other=0.0)
    for r in range(0, R):
        tl.store(states_ptr + r * N * D + at, x, mask=m)
        u = tl.load(u_ptr + r * D + d, mask=d < D, other=0.0)
        tau = tl.load(tau_ptr + n * R + r, mask=n < N, other=0.0)
        b = 2.0 / (1.0 + tl.exp(-tau))
        along = tl.sum(x * u[None, :], 1)
        x = x - (b * along)[:, None] * u[None, :]
    tl.store(y_ptr + at, x, mask=m)


@triton.jit
def _bwd_kernel(g_ptr, u_ptr, tau_ptr, states_ptr, dx_ptr, dtau_ptr, part_ptr, N, D, R, BLOCK_N: tl.constexpr,
                BLOCK_D: tl.constexpr):  # fmt: skip
    block = tl.program_id(0)
    n, d = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    at = n[:, None] * D + d[None, :]
    m = (n[:, None] < N) & (d[None, :] < D)
    g = tl.load(g_ptr + at, mask=m, other=0.0)
    for back in range(0, R):
        r = R - 1 - back
        x = tl.load(states_ptr + r * N * D + at, mask=m, other=0.0)
        u = tl.load(u_ptr + r * D + d, mask=d < D, other=0.0)
        tau = tl.load(tau_ptr + n * R + r, mask=n < N, other=0.0)
        gate = 1.0 / (1.0 + tl.exp(-tau))
        x_along = tl.sum(x * u[None, :], 1)
        g_along = tl.sum(g * u[None, :], 1)
        dtau = -2.0 * gate * (1.0 - gate) * x_along * g_along
        tl.store(dtau_ptr + n * R + r, dtau, mask=n < N)
        b = 2.0 * gate
        du = -b[:, None] * (x_along[:, None] * g + g_along[:, None] * x)
        tl.store(part_ptr + (block * R + r) * D + d, tl.sum(du, 0), mask=d < D)
        g = g - (b * g_along)[:, None] * u[None, :]
    tl.store(dx_ptr + at, g, mask=m)


@triton.jit
def _vector_kernel(part_ptr, u_ptr, inv_norm_ptr, dw_ptr, blocks, D, R, BLOCK_D: tl.constexpr):
    r, d = tl.program_id(0), tl.arange(0, BLOCK_D)
    du = tl.zeros([BLOCK_D], tl.float32)
    for block in range(0, blocks):
        du += tl.load(part_ptr + (block * R + r) * D + d, mask=d < D, other=0.0)
    u = tl.load(u_ptr + r * D + d, mask=d < D, other=0.0)
    inv_norm = tl.load(inv_norm_ptr + r)
    tl.store(dw_ptr + r * D + d, (du - tl.sum(du * u) * u) * inv_norm, mask=d < D)


class HouseholderChain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, tau):
        x, w, tau = x.contiguous(), w.contiguous(), tau.contiguous()
        (N, D), R = x.shape, w.shape[0]
        block_d = triton.next_power_of_2(D)
        u, inv_norm = torch.empty_like(w), w.new_empty(R)
        _norm_kernel[(R,)](w, u, inv_norm, D, block_d)
        u = assay.stage("u", u)
        states, y = x.new_empty(R, N, D), torch.empty_like(x)
        _fwd_kernel[(triton.cdiv(N, BLOCK_N),)](x, u, tau, states, y, N, D, R, BLOCK_N, block_d)
        ctx.save_for_backward(u, inv_norm, tau, states)
        return y

    @staticmethod
    def backward(ctx, g):
        u, inv_norm, tau, states = ctx.saved_tensors
        (R, N, D), g = states.shape, g.contiguous()
        blocks, block_d = triton.cdiv(N, BLOCK_N), triton.next_power_of_2(D)
        dx, dw, dtau = torch.empty_like(g), torch.empty_like(u), torch.empty_like(tau)
        part = u.new_empty(blocks, R, D)
        _bwd_kernel[(blocks,)](g, u, tau, states, dx, dtau, part, N, D, R, BLOCK_N, block_d)
        _vector_kernel[(R,)](part, u, inv_norm, dw, blocks, D, R, block_d)
        return dx, dw, dtau


def kernel(x, w, tau):
    return HouseholderChain.apply(x, w, tau)


def target():
    return assay.Target(kernel, golden, cases=[rows, columns_first], name="householder_chain", outputs=("y",))
