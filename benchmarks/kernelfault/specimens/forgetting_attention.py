"""o_i = sum_{j <= i} p_ij v_j,  p_i = softmax_j(scale q_i . k_j + c_i - c_j),  c = running sum of log sigmoid(gate).

Attention that forgets: each head has a gate per token, and the weight of a key fades with every gate between it and the
query. Triton, float32. One kernel makes c, by chunks; one walks over blocks of keys up to the diagonal. The backward
has a kernel for keys, values and c, one for queries, and one that sums the gates' gradients from the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK = 16


@assay.case(B=[2], H=[2], T=[21], D=[6])
def heads(make, B, H, T, D):
    return {
        "q": make.normal(B, H, T, D), "k": make.normal(B, H, T, D), "v": make.normal(B, H, T, D),
        "gate": 1 + make.normal(B, H, T), "scale": 0.4,
    }  # fmt: skip


@assay.case(B=[1], H=[1], T=[35], D=[8])
def longer(make, B, H, T, D):
    v = make.normal(B, T, H, D).transpose(1, 2)
    return {**heads[0].draw(make, B, H, T, D), "v": v, "gate": 2 + make.normal(B, H, T), "scale": 0.3}


def golden(q, k, v, gate, scale):
    c = assay.stage("c", torch.nn.functional.logsigmoid(gate).cumsum(-1))
    T = q.shape[2]
    z = scale * (q @ k.mT) + c.unsqueeze(-1) - c.unsqueeze(-2)
    z = z.masked_fill(~torch.ones(T, T, dtype=torch.bool, device=q.device).tril(), -torch.inf)
    lse = assay.stage("lse", torch.logsumexp(z, -1))
    return torch.exp(z - lse.unsqueeze(-1)) @ v


# n batch and head, i queries, j keys, d dim
@triton.jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _decay_kernel(gate_ptr, c_ptr, T, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    carry = 0.0
    for first in range(0, T, BLOCK):
        i = first + tl.arange(0, BLOCK)
        log_f = _log_sigmoid(tl.load(gate_ptr + n * T + i, mask=i < T, other=0.0))
        log_f = tl.where(i < T, log_f, 0.0)
        tl.store(c_ptr + n * T + i, carry + tl.cumsum(log_f, 0), mask=i < T)
        carry += tl.sum(log_f)


@triton.jit
def _fwd_kernel(q_ptr, k_ptr, v_ptr, c_ptr, o_ptr, lse_ptr, T, D, scale, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    n, block = tl.program_id(0), tl.program_id(1)
    step, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    i = block * BLOCK + step
    at = (n * T + i[:, None]) * D + d[None, :]
    m = (i[:, None] < T) & (d[None, :] < D)
    q = tl.load(q_ptr + at, mask=m, other=0.0)
    ci = tl.load(c_ptr + n * T + i, mask=i < T, other=0.0)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for first in range(0, (block + 1) * BLOCK, BLOCK):
        j = first + step
        key = (n * T + j[:, None]) * D + d[None, :]
        mk = (j[:, None] < T) & (d[None, :] < D)
        k = tl.load(k_ptr + key, mask=mk, other=0.0)
        v = tl.load(v_ptr + key, mask=mk, other=0.0)
        cj = tl.load(c_ptr + n * T + j, mask=j < T, other=0.0)
        z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + ci[:, None] - cj[None, :]
        z = tl.where(j[None, :] <= i[:, None], z, -float("inf"))
        new = tl.maximum(top, tl.max(z, 1))
        fade = tl.exp(top - new)
        p = tl.exp(z - new[:, None])
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p, v, input_precision="ieee")
        top = new
    tl.store(o_ptr + at, acc / total[:, None], mask=m)
    tl.store(lse_ptr + n * T + i, top + tl.log(total), mask=i < T)


@triton.jit
def _weights(q, k, ci, cj, lse, i, j, T, scale):
    z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + ci[:, None] - cj[None, :]
    seen = (j[None, :] <= i[:, None]) & (i[:, None] < T)
    return tl.where(seen, tl.exp(z - lse[:, None]), 0.0)


@triton.jit
def _bwd_keys_kernel(q_ptr, k_ptr, v_ptr, c_ptr, g_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dc_ptr, T, D, scale,
                     BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    n, block = tl.program_id(0), tl.program_id(1)
    step, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    j = block * BLOCK + step
    key = (n * T + j[:, None]) * D + d[None, :]
    mk = (j[:, None] < T) & (d[None, :] < D)
    k = tl.load(k_ptr + key, mask=mk, other=0.0)
    v = tl.load(v_ptr + key, mask=mk, other=0.0)
    cj = tl.load(c_ptr + n * T + j, mask=j < T, other=0.0)
    dk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dc = tl.zeros([BLOCK], tl.float32)
    for first in range(block * BLOCK, T, BLOCK):
        i = first + step
        at = (n * T + i[:, None]) * D + d[None, :]
        m = (i[:, None] < T) & (d[None, :] < D)
        q = tl.load(q_ptr + at, mask=m, other=0.0)
        g = tl.load(g_ptr + at, mask=m, other=0.0)
        ci = tl.load(c_ptr + n * T + i, mask=i < T, other=0.0)
        lse = tl.load(lse_ptr + n * T + i, mask=i < T, other=0.0)
        delta = tl.load(delta_ptr + n * T + i, mask=i < T, other=0.0)
        p = _weights(q, k, ci, cj, lse, i, j, T, scale)
        dv += tl.dot(tl.trans(p), g, input_precision="ieee")
        dz = p * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
        dk += tl.dot(tl.trans(dz), q, input_precision="ieee") * scale
        dc -= tl.sum(dz, 0)
    tl.store(dk_ptr + key, dk, mask=mk)
    tl.store(dv_ptr + key, dv, mask=mk)
    tl.store(dc_ptr + n * T + j, dc, mask=j < T)


@triton.jit
def _bwd_queries_kernel(q_ptr, k_ptr, v_ptr, c_ptr, g_ptr, lse_ptr, delta_ptr, dq_ptr, dc_ptr, T, D, scale,
                        BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    n, block = tl.program_id(0), tl.program_id(1)
    step, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    i = block * BLOCK + step
    at = (n * T + i[:, None]) * D + d[None, :]
    m = (i[:, None] < T) & (d[None, :] < D)
    q = tl.load(q_ptr + at, mask=m, other=0.0)
    g = tl.load(g_ptr + at, mask=m, other=0.0)
    ci = tl.load(c_ptr + n * T + i, mask=i < T, other=0.0)
    lse = tl.load(lse_ptr + n * T + i, mask=i < T, other=0.0)
    delta = tl.load(delta_ptr + n * T + i, mask=i < T, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dc = tl.load(dc_ptr + n * T + i, mask=i < T, other=0.0)
    for first in range(0, (block + 1) * BLOCK, BLOCK):
        j = first + step
        key = (n * T + j[:, None]) * D + d[None, :]
        mk = (j[:, None] < T) & (d[None, :] < D)
        k = tl.load(k_ptr + key, mask=mk, other=0.0)
        v = tl.load(v_ptr + key, mask=mk, other=0.0)
        cj = tl.load(c_ptr + n * T + j, mask=j < T, other=0.0)
        p = _weights(q, k, ci, cj, lse, i, j, T, scale)
        dz = p * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq += tl.dot(dz, k, input_precision="ieee")
        dc += tl.sum(dz, 1)
    tl.store(dq_ptr + at, dq * scale, mask=m)
    tl.store(dc_ptr + n * T + i, dc, mask=i < T)


@triton.jit
def _bwd_gate_kernel(gate_ptr, dc_ptr, dgate_ptr, T, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    carry = 0.0
    for back in range(0, tl.cdiv(T, BLOCK)):
        i = (tl.cdiv(T, BLOCK) - 1 - back) * BLOCK + tl.arange(0, BLOCK)
        dc = tl.load(dc_ptr + n * T + i, mask=i < T, other=0.0)
        after = carry + tl.sum(dc) - tl.cumsum(dc, 0) + dc
        gate = tl.load(gate_ptr + n * T + i, mask=i < T, other=0.0)
        tl.store(dgate_ptr + n * T + i, after / (1.0 + tl.exp(gate)), mask=i < T)
        carry += tl.sum(dc)


class ForgettingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, gate, scale):
        q, k, v, gate = q.contiguous(), k.contiguous(), v.contiguous(), gate.contiguous()
        B, H, T, D = q.shape
        c, lse, o = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(q)
        _decay_kernel[(B * H,)](gate, c, T, BLOCK)
        c = assay.stage("c", c)
        block_d = max(16, triton.next_power_of_2(D))
        _fwd_kernel[(B * H, triton.cdiv(T, BLOCK))](q, k, v, c, o, lse, T, D, scale, BLOCK, block_d)
        lse = assay.stage("lse", lse)
        ctx.save_for_backward(q, k, v, gate, c, o, lse)
        ctx.scale = scale
        return o

    @staticmethod
    def backward(ctx, g):
        q, k, v, gate, c, o, lse = ctx.saved_tensors
        (B, H, T, D), g = q.shape, g.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dc, dgate = torch.empty_like(c), torch.empty_like(gate)
        delta = (o * g).sum(-1)
        grid, block_d = (B * H, triton.cdiv(T, BLOCK)), max(16, triton.next_power_of_2(D))
        _bwd_keys_kernel[grid](q, k, v, c, g, lse, delta, dk, dv, dc, T, D, ctx.scale, BLOCK, block_d)
        _bwd_queries_kernel[grid](q, k, v, c, g, lse, delta, dq, dc, T, D, ctx.scale, BLOCK, block_d)
        _bwd_gate_kernel[(B * H,)](gate, dc, dgate, T, BLOCK)
        return dq, dk, dv, dgate, None


def kernel(q, k, v, gate, scale):
    return ForgettingAttention.apply(q, k, v, gate, scale)


def target():
    return assay.Target(kernel, golden, cases=[heads, longer], name="forgetting_attention", outputs=("o",))
