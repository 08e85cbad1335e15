"""o[h, i] = sum_{j < i} beta_ij prod_{j < k < i} (1 - beta_ik) v[h, j],  beta = sigmoid(scale q_i . k_j).

Stick-breaking attention: each query breaks its weight off from the nearest key to the farthest; `rest` is what is left.
Triton, float32: a program has a block of rows and walks over blocks of keys from right to left. It keeps the sum over
the later keys at every block, from which the backward forms the weights again: by rows for q, by columns for k and v.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK = 16


@assay.case(H=[2], T=[37], D=[16])
def heads(make, H, T, D):
    return {name: make.normal(H, T, D) for name in "qkv"} | {"scale": 0.25}


@assay.case(H=[1], T=[20], D=[12])
def narrow(make, H, T, D):
    return {name: make.normal(T, H, D).transpose(0, 1) for name in "qkv"} | {"scale": 0.4}


def golden(q, k, v, scale):
    T = q.shape[1]
    sees = torch.ones(T, T, dtype=torch.bool, device=q.device).tril(-1)
    z = scale * (q @ k.mT)
    soft = torch.nn.functional.softplus(z).masked_fill(~sees, 0.0)
    later = torch.nn.functional.pad(soft[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
    att = torch.exp(z - soft - later).masked_fill(~sees, 0.0)
    return att @ v, torch.exp(-soft.sum(-1))


@triton.jit
def _logits(q, k, rows, cols, T, scale):
    sees = (cols[None, :] < rows[:, None]) & (rows[:, None] < T)
    z = tl.where(sees, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, 0.0)
    soft = tl.where(sees, tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z))), 0.0)
    return z, soft, sees


@triton.jit
def _weights(z, soft, sees, later, step):
    after = (step[:, None] > step[None, :]).to(tl.float32)
    log_att = z - soft - tl.dot(soft, after, input_precision="ieee") - later[:, None]
    return tl.where(sees, tl.exp(log_att), 0.0)


@triton.jit
def _logit_grads(att, z, soft, sees, g, v, before, step):
    shares = att * tl.dot(g, tl.trans(v), input_precision="ieee")
    ahead = (step[:, None] < step[None, :]).to(tl.float32)
    through = tl.dot(shares, ahead, input_precision="ieee") + before[:, None]
    beta = tl.exp(z - soft)
    return shares, tl.where(sees, shares - beta * (shares + through), 0.0)


@triton.jit
def _fwd_kernel(q_ptr, k_ptr, v_ptr, o_ptr, rest_ptr, later_ptr, T, D, NB, scale,
                BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    h, i = tl.program_id(0), tl.program_id(1)
    step, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    rows = i * BLOCK + step
    at = h * T * D + rows[:, None] * D + d[None, :]
    inside = (rows[:, None] < T) & (d[None, :] < D)
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    later = tl.zeros([BLOCK], tl.float32)
    for back in range(0, i + 1):
        n = i - back
        cols = n * BLOCK + step
        key = h * T * D + cols[:, None] * D + d[None, :]
        is_key = (cols[:, None] < T) & (d[None, :] < D)
        k = tl.load(k_ptr + key, mask=is_key, other=0.0)
        v = tl.load(v_ptr + key, mask=is_key, other=0.0)
        tl.store(later_ptr + (h * NB + n) * T + rows, later, mask=rows < T)
        z, soft, sees = _logits(q, k, rows, cols, T, scale)
        acc += tl.dot(_weights(z, soft, sees, later, step), v, input_precision="ieee")
        later += tl.sum(soft, 1)
    tl.store(o_ptr + at, acc, mask=inside)
    tl.store(rest_ptr + h * T + rows, tl.exp(-later), mask=rows < T)


@triton.jit
def _bwd_rows_kernel(q_ptr, k_ptr, v_ptr, rest_ptr, later_ptr, g_ptr, grest_ptr, before_ptr, dq_ptr, T, D, NB, scale,
                     BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    h, i = tl.program_id(0), tl.program_id(1)
    step, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    rows = i * BLOCK + step
    at = h * T * D + rows[:, None] * D + d[None, :]
    inside = (rows[:, None] < T) & (d[None, :] < D)
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    g = tl.load(g_ptr + at, mask=inside, other=0.0)
    rest = tl.load(rest_ptr + h * T + rows, mask=rows < T, other=0.0)
    before = rest * tl.load(grest_ptr + h * T + rows, mask=rows < T, other=0.0)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for n in range(0, i + 1):
        cols = n * BLOCK + step
        key = h * T * D + cols[:, None] * D + d[None, :]
        is_key = (cols[:, None] < T) & (d[None, :] < D)
        k = tl.load(k_ptr + key, mask=is_key, other=0.0)
        v = tl.load(v_ptr + key, mask=is_key, other=0.0)
        later = tl.load(later_ptr + (h * NB + n) * T + rows, mask=rows < T, other=0.0)
        z, soft, sees = _logits(q, k, rows, cols, T, scale)
        att = _weights(z, soft, sees, later, step)
        tl.store(before_ptr + (h * NB + n) * T + rows, before, mask=rows < T)
        shares, dz = _logit_grads(att, z, soft, sees, g, v, before, step)
        acc += tl.dot(dz, k, input_precision="ieee")
        before += tl.sum(shares, 1)
    tl.store(dq_ptr + at, acc * scale, mask=inside)


@triton.jit
def _bwd_cols_kernel(q_ptr, k_ptr, v_ptr, later_ptr, before_ptr, g_ptr, dk_ptr, dv_ptr, T, D, NB, scale,
                     BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    h, n = tl.program_id(0), tl.program_id(1)
    step, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    cols = n * BLOCK + step
    key = h * T * D + cols[:, None] * D + d[None, :]
    is_key = (cols[:, None] < T) & (d[None, :] < D)
    k = tl.load(k_ptr + key, mask=is_key, other=0.0)
    v = tl.load(v_ptr + key, mask=is_key, other=0.0)
    dk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for i in range(n, NB):
        rows = i * BLOCK + step
        at = h * T * D + rows[:, None] * D + d[None, :]
        inside = (rows[:, None] < T) & (d[None, :] < D)
        q = tl.load(q_ptr + at, mask=inside, other=0.0)
        g = tl.load(g_ptr + at, mask=inside, other=0.0)
        later = tl.load(later_ptr + (h * NB + n) * T + rows, mask=rows < T, other=0.0)
        before = tl.load(before_ptr + (h * NB + n) * T + rows, mask=rows < T, other=0.0)
        z, soft, sees = _logits(q, k, rows, cols, T, scale)
        att = _weights(z, soft, sees, later, step)
        shares, dz = _logit_grads(att, z, soft, sees, g, v, before, step)
        dv += tl.dot(tl.trans(att), g, input_precision="ieee")
        dk += tl.dot(tl.trans(dz), q, input_precision="ieee")
    tl.store(dk_ptr + key, dk * scale, mask=is_key)
    tl.store(dv_ptr + key, dv, mask=is_key)


class StickBreaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        H, T, D = q.shape
        blocks, block_d = triton.cdiv(T, BLOCK), max(16, triton.next_power_of_2(D))
        o, rest, later = torch.empty_like(q), q.new_empty(H, T), q.new_empty(H, blocks, T)
        _fwd_kernel[(H, blocks)](q, k, v, o, rest, later, T, D, blocks, scale, BLOCK, block_d)
        ctx.save_for_backward(q, k, v, rest, later)
        ctx.scale = scale
        return o, rest

    @staticmethod
    def backward(ctx, g, grest):
        q, k, v, rest, later = ctx.saved_tensors
        H, T, D = q.shape
        g, grest = g.contiguous(), grest.contiguous()
        blocks, block_d = triton.cdiv(T, BLOCK), max(16, triton.next_power_of_2(D))
        dq, dk, dv, before = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(later)
        _bwd_rows_kernel[(H, blocks)](
            q, k, v, rest, later, g, grest, before, dq, T, D, blocks, ctx.scale, BLOCK, block_d
        )  # fmt: skip
        _bwd_cols_kernel[(H, blocks)](q, k, v, later, before, g, dk, dv, T, D, blocks, ctx.scale, BLOCK, block_d)
        return dq, dk, dv, None


def kernel(q, k, v, scale):
    return StickBreaking.apply(q, k, v, scale)


def target():
    return assay.Target(kernel, golden, cases=[heads, narrow], name="stick_breaking", outputs=("o", "rest"))
