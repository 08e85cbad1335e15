"""o_t = scale q_t S_t,  S_t = exp(log_a_t)[:, None] S_{t-1} + k_t v_t^T,  log_a = logsigmoid(gate) / 8.

Gated linear attention by chunks of 16 tokens. Triton, float32: one kernel sums the log decays within a chunk, one walks
over chunks and keeps the state before each, one forms outputs from that state and the chunk's own tokens. The backward
walks from the last chunk to the first, then forms all gradients chunk by chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

C, BLOCK_V, NORM = 16, 16, 8.0


@assay.case(B=[1], T=[19], H=[2], K=[5], V=[6])
def ragged(make, B, T, H, K, V):
    return {
        "q": make.normal(B, T, H, K), "k": make.normal(B, T, H, K), "v": make.normal(B, T, H, V),
        "gate": 1 + make.normal(B, T, H, K), "s0": make.normal(B, H, K, V), "scale": K**-0.5,
    }  # fmt: skip


@assay.case(B=[2], T=[16], H=[1], K=[4], V=[18])
def whole(make, B, T, H, K, V):
    return {**ragged[0].draw(make, B, T, H, K, V), "v": make.normal(B, H, T, V).transpose(1, 2)}


def golden(q, k, v, gate, s0, scale):
    a = torch.exp(torch.nn.functional.logsigmoid(gate) / NORM)
    s, before, o = s0, [], []
    for t in range(q.shape[1]):
        if t % C == 0:
            before.append(s)
        s = a[:, t].unsqueeze(-1) * s + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        o.append(scale * (q[:, t].unsqueeze(-1) * s).sum(-2))
    assay.stage("states", torch.stack(before, 2))
    return torch.stack(o, 1), s


# b batch, h head, n chunk, t token, d key dim, e value dim; g log decay summed from the chunk's start
@triton.jit
def _cumsum_kernel(gate_ptr, g_ptr, T, H, K, NORM: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr):
    b, h, n = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1)
    t, d = n * C + tl.arange(0, C), tl.arange(0, BLOCK_K)
    at = ((b * T + t[:, None]) * H + h) * K + d[None, :]
    m = (t[:, None] < T) & (d[None, :] < K)
    x = tl.load(gate_ptr + at, mask=m, other=0.0)
    log_a = (tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))) / NORM
    tl.store(g_ptr + at, tl.cumsum(log_a, 0), mask=m)


@triton.jit
def _states_kernel(k_ptr, v_ptr, g_ptr, s0_ptr, states_ptr, last_ptr, T, H, K, V, N, C: tl.constexpr,
                   BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    bh = tl.program_id(0)
    b, h = bh // H, bh % H
    d, e = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    state, in_state = d[:, None] * V + e[None, :], (d[:, None] < K) & (e[None, :] < V)
    s = tl.load(s0_ptr + bh * K * V + state, mask=in_state, other=0.0)
    for n in range(0, N):
        tl.store(states_ptr + (bh * N + n) * K * V + state, s, mask=in_state)
        t = n * C + tl.arange(0, C)
        row = (b * T + t[:, None]) * H + h
        end = tl.minimum((n + 1) * C, T) - 1
        mk, mv = (t[:, None] < T) & (d[None, :] < K), (t[:, None] < T) & (e[None, :] < V)
        k = tl.load(k_ptr + row * K + d[None, :], mask=mk, other=0.0)
        g = tl.load(g_ptr + row * K + d[None, :], mask=mk, other=0.0)
        v = tl.load(v_ptr + row * V + e[None, :], mask=mv, other=0.0)
        g_end = tl.load(g_ptr + ((b * T + end) * H + h) * K + d, mask=d < K, other=0.0)
        decayed = k * tl.exp(g_end[None, :] - g)
        s = s * tl.exp(g_end)[:, None] + tl.dot(tl.trans(decayed), v, input_precision="ieee")
    tl.store(last_ptr + bh * K * V + state, s, mask=in_state)


@triton.jit
def _out_kernel(q_ptr, k_ptr, v_ptr, g_ptr, states_ptr, o_ptr, T, H, K, V, N, scale, C: tl.constexpr,
                BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    bh, n = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    step = tl.arange(0, C)
    t, d, e = n * C + step, tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    row = (b * T + t[:, None]) * H + h
    mk, mv = (t[:, None] < T) & (d[None, :] < K), (t[:, None] < T) & (e[None, :] < V)
    q = tl.load(q_ptr + row * K + d[None, :], mask=mk, other=0.0)
    g = tl.load(g_ptr + row * K + d[None, :], mask=mk, other=0.0)
    s = tl.load(states_ptr + ((bh * N + n) * K + d[:, None]) * V + e[None, :],
                mask=(d[:, None] < K) & (e[None, :] < V), other=0.0)  # fmt: skip
    o = tl.dot(q * tl.exp(g), s, input_precision="ieee")
    k = tl.load(k_ptr + row * K + d[None, :], mask=mk, other=0.0)
    v = tl.load(v_ptr + row * V + e[None, :], mask=mv, other=0.0)
    seen = (step[:, None] >= step[None, :]) & (t[:, None] < T)
    decay = tl.where(seen[:, :, None], tl.exp(g[:, None, :] - g[None, :, :]), 0.0)
    att = tl.sum(q[:, None, :] * k[None, :, :] * decay, 2)
    o += tl.dot(att, v, input_precision="ieee")
    tl.store(o_ptr + row * V + e[None, :], o * scale, mask=mv)


@triton.jit
def _dstates_kernel(q_ptr, g_ptr, do_ptr, dlast_ptr, dstates_ptr, ds0_ptr, T, H, K, V, N, scale, C: tl.constexpr,
                    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    bh = tl.program_id(0)
    b, h = bh // H, bh % H
    d, e = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    state, in_state = d[:, None] * V + e[None, :], (d[:, None] < K) & (e[None, :] < V)
    ds = tl.load(dlast_ptr + bh * K * V + state, mask=in_state, other=0.0)
    for back in range(0, N):
        n = N - 1 - back
        tl.store(dstates_ptr + (bh * N + n) * K * V + state, ds, mask=in_state)
        t = n * C + tl.arange(0, C)
        row = (b * T + t[:, None]) * H + h
        end = tl.minimum((n + 1) * C, T) - 1
        mk, mv = (t[:, None] < T) & (d[None, :] < K), (t[:, None] < T) & (e[None, :] < V)
        q = tl.load(q_ptr + row * K + d[None, :], mask=mk, other=0.0)
        g = tl.load(g_ptr + row * K + d[None, :], mask=mk, other=0.0)
        do = tl.load(do_ptr + row * V + e[None, :], mask=mv, other=0.0)
        g_end = tl.load(g_ptr + ((b * T + end) * H + h) * K + d, mask=d < K, other=0.0)
        read = tl.trans(q * tl.exp(g)) * scale
        ds = ds * tl.exp(g_end)[:, None] + tl.dot(read, do, input_precision="ieee")
    tl.store(ds0_ptr + bh * K * V + state, ds, mask=in_state)


@triton.jit
def _grads_kernel(q_ptr, k_ptr, v_ptr, gate_ptr, g_ptr, states_ptr, do_ptr, dstates_ptr, dq_ptr, dk_ptr, dv_ptr,
                  dgate_ptr, T, H, K, V, N, scale, NORM: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr,
                  BLOCK_V: tl.constexpr):  # fmt: skip
    bh, n = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    step, d = tl.arange(0, C), tl.arange(0, BLOCK_K)
    t = n * C + step
    row = (b * T + t[:, None]) * H + h
    mk = (t[:, None] < T) & (d[None, :] < K)
    q = tl.load(q_ptr + row * K + d[None, :], mask=mk, other=0.0)
    k = tl.load(k_ptr + row * K + d[None, :], mask=mk, other=0.0)
    g = tl.load(g_ptr + row * K + d[None, :], mask=mk, other=0.0)
    end = tl.minimum((n + 1) * C, T) - 1
    g_end = tl.load(g_ptr + ((b * T + end) * H + h) * K + d, mask=d < K, other=0.0)
    to_end = tl.exp(g_end[None, :] - g)
    datt = tl.zeros([C, C], tl.float32)
    dq = tl.zeros([C, BLOCK_K], tl.float32)
    dk = tl.zeros([C, BLOCK_K], tl.float32)
    carried = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, V, BLOCK_V):
        e = first + tl.arange(0, BLOCK_V)
        mv = (t[:, None] < T) & (e[None, :] < V)
        state, in_state = ((bh * N + n) * K + d[:, None]) * V + e[None, :], (d[:, None] < K) & (e[None, :] < V)
        v = tl.load(v_ptr + row * V + e[None, :], mask=mv, other=0.0)
        do = tl.load(do_ptr + row * V + e[None, :], mask=mv, other=0.0)
        s = tl.load(states_ptr + state, mask=in_state, other=0.0)
        ds = tl.load(dstates_ptr + state, mask=in_state, other=0.0)
        datt += tl.dot(do, tl.trans(v), input_precision="ieee")
        dq += tl.dot(do, tl.trans(s), input_precision="ieee")
        dk += tl.dot(v, tl.trans(ds), input_precision="ieee")
        carried += tl.sum(s * ds, 1)
    dq *= tl.exp(g) * scale
    dk *= to_end
    carried *= tl.exp(g_end)
    seen = (step[:, None] >= step[None, :]) & (t[:, None] < T)
    decay = tl.where(seen[:, :, None], tl.exp(g[:, None, :] - g[None, :, :]), 0.0) * scale
    pairs = q[:, None, :] * k[None, :, :] * decay
    att = tl.sum(pairs, 2)
    # a decay is in every pair and state that it lies between: queries from its token on, keys before it
    later = tl.cumsum(datt[:, :, None] * pairs, 0, reverse=True) + (k * dk)[None, :, :]
    between = tl.where((step[:, None] > step[None, :])[:, :, None], later, 0.0)
    dlog_a = tl.sum(between, 1) + tl.cumsum(q * dq, 0, reverse=True) + carried[None, :]
    dq += tl.sum(datt[:, :, None] * k[None, :, :] * decay, 1)
    dk += tl.sum(datt[:, :, None] * q[:, None, :] * decay, 0)
    x = tl.load(gate_ptr + row * K + d[None, :], mask=mk, other=0.0)
    tl.store(dq_ptr + row * K + d[None, :], dq, mask=mk)
    tl.store(dk_ptr + row * K + d[None, :], dk, mask=mk)
    tl.store(dgate_ptr + row * K + d[None, :], dlog_a * tl.sigmoid(-x) / NORM, mask=mk)
    for first in range(0, V, BLOCK_V):
        e = first + tl.arange(0, BLOCK_V)
        mv = (t[:, None] < T) & (e[None, :] < V)
        state, in_state = ((bh * N + n) * K + d[:, None]) * V + e[None, :], (d[:, None] < K) & (e[None, :] < V)
        do = tl.load(do_ptr + row * V + e[None, :], mask=mv, other=0.0)
        ds = tl.load(dstates_ptr + state, mask=in_state, other=0.0)
        dv = tl.dot(tl.trans(att), do, input_precision="ieee") + tl.dot(k * to_end, ds, input_precision="ieee")
        tl.store(dv_ptr + row * V + e[None, :], dv, mask=mv)


class GatedLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, gate, s0, scale):
        q, k, v, gate, s0 = (x.contiguous() for x in (q, k, v, gate, s0))
        B, T, H, K = q.shape
        V, N, block_k = v.shape[-1], triton.cdiv(T, C), max(16, triton.next_power_of_2(K))
        tiles = triton.cdiv(V, BLOCK_V)
        g, o, last, states = (
            torch.empty_like(gate),
            torch.empty_like(v),
            torch.empty_like(s0),
            q.new_empty(B, H, N, K, V),
        )
        _cumsum_kernel[(B * H, N)](gate, g, T, H, K, NORM, C, block_k)
        _states_kernel[(B * H, tiles)](k, v, g, s0, states, last, T, H, K, V, N, C, block_k, BLOCK_V)
        states = assay.stage("states", states)
        _out_kernel[(B * H, N, tiles)](q, k, v, g, states, o, T, H, K, V, N, scale, C, block_k, BLOCK_V)
        ctx.save_for_backward(q, k, v, gate, g, states)
        ctx.scale = scale
        return o, last

    @staticmethod
    def backward(ctx, do, dlast):
        q, k, v, gate, g, states = ctx.saved_tensors
        do, dlast = do.contiguous(), dlast.contiguous()
        B, T, H, K = q.shape
        V, N, block_k = v.shape[-1], states.shape[2], max(16, triton.next_power_of_2(K))
        dstates, ds0 = torch.empty_like(states), torch.empty_like(dlast)
        dq, dk, dv, dgate = (torch.empty_like(x) for x in (q, k, v, gate))
        _dstates_kernel[(B * H, triton.cdiv(V, BLOCK_V))](
            q, g, do, dlast, dstates, ds0, T, H, K, V, N, ctx.scale, C, block_k, BLOCK_V
        )  # fmt: skip
        _grads_kernel[(B * H, N)](
            q, k, v, gate, g, states, do, dstates, dq, dk, dv, dgate, T, H, K, V, N, ctx.scale, NORM, C, block_k,
            BLOCK_V,
        )  # fmt: skip
        return dq, dk, dv, dgate, ds0, None


def kernel(q, k, v, gate, s0, scale):
    return GatedLinearAttention.apply(q, k, v, gate, s0, scale)


def target():
    return assay.Target(kernel, golden, cases=[ragged, whole], name="gla_chunk", outputs=("o", "last"))
