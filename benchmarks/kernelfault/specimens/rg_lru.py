"""h_t = a_t h_{t-1} + sqrt(1 - a_t^2 + eps) sigmoid(input_gate_t) x_t,  a = exp(-8 softplus(lam) sigmoid(decay_gate)).

The real-gated linear recurrent unit of Griffin over packed documents: at a document's first token a_t is 0, so nothing
of the document before is left. Triton, float32: a program has a sequence and a block of channels and walks over time;
lam's gradient comes from sequences' shares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK, C, EPS = 16, 8.0, 1e-3


@assay.case(B=[2], T=[9], D=[19])
def packed(make, B, T, D):
    return {
        "x": make.normal(B, T, D), "decay_gate": make.normal(B, T, D), "input_gate": make.normal(B, T, D),
        "lam": -3 + make.normal(D), "h0": make.normal(B, D), "starts": make.integers(0, 5, B, T) == 0,
    }  # fmt: skip


@assay.case(B=[2], T=[6], D=[8])
def continued(make, B, T, D):
    starts = torch.zeros(B, T, dtype=torch.bool, device=make.device)
    starts[1, 4] = True
    return {**packed[0].draw(make, B, T, D), "starts": starts, "x": make.normal(T, B, D).transpose(0, 1)}


def golden(x, decay_gate, input_gate, lam, h0, starts):
    log_a = -C * torch.nn.functional.softplus(lam) * torch.sigmoid(decay_gate)
    a = torch.exp(log_a).masked_fill(starts.unsqueeze(-1), 0.0)
    u = torch.sqrt(1 - a * a + EPS) * (torch.sigmoid(input_gate) * x)
    h, states = h0, []
    for t in range(x.shape[1]):
        h = a[:, t] * h + u[:, t]
        states.append(h)
    return torch.stack(states, 1)


@triton.jit
def _fwd_kernel(x_ptr, ra_ptr, ia_ptr, rate_ptr, h0_ptr, start_ptr, h_ptr, T, D, EPS: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    b = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = d < D
    rate = tl.load(rate_ptr + d, mask=m, other=0.0)
    h = tl.load(h0_ptr + b * D + d, mask=m, other=0.0)
    for t in range(0, T):
        at = (b * T + t) * D + d
        x = tl.load(x_ptr + at, mask=m, other=0.0)
        r = tl.sigmoid(tl.load(ra_ptr + at, mask=m, other=0.0))
        i = tl.sigmoid(tl.load(ia_ptr + at, mask=m, other=0.0))
        a = tl.exp(-rate * r)
        a = tl.where(tl.load(start_ptr + b * T + t) != 0, 0.0, a)
        gain = tl.sqrt(1.0 - a * a + EPS)
        h = a * h + gain * (i * x)
        tl.store(h_ptr + at, h, mask=m)


@triton.jit
def _bwd_kernel(x_ptr, ra_ptr, ia_ptr, rate_ptr, h0_ptr, start_ptr, h_ptr, g_ptr, dx_ptr, dra_ptr, dia_ptr, dh0_ptr,
                part_ptr, T, D, EPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    b = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = d < D
    rate = tl.load(rate_ptr + d, mask=m, other=0.0)
    carry = tl.zeros([BLOCK], tl.float32)
    drate = tl.zeros([BLOCK], tl.float32)
    for step in range(0, T):
        t = T - 1 - step
        at = (b * T + t) * D + d
        x = tl.load(x_ptr + at, mask=m, other=0.0)
        r = tl.sigmoid(tl.load(ra_ptr + at, mask=m, other=0.0))
        i = tl.sigmoid(tl.load(ia_ptr + at, mask=m, other=0.0))
        first = tl.load(start_ptr + b * T + t) != 0
        a = tl.where(first, 0.0, tl.exp(-rate * r))
        gain = tl.sqrt(1.0 - a * a + EPS)
        if t > 0:
            past = tl.load(h_ptr + at - D, mask=m, other=0.0)
        else:
            past = tl.load(h0_ptr + b * D + d, mask=m, other=0.0)
        dh = carry + tl.load(g_ptr + at, mask=m, other=0.0)
        dlog_a = a * (dh * past) - a * a / gain * (dh * i * x)
        drate -= dlog_a * r
        tl.store(dx_ptr + at, dh * gain * i, mask=m)
        tl.store(dia_ptr + at, dh * gain * x * i * (1.0 - i), mask=m)
        tl.store(dra_ptr + at, -dlog_a * rate * r * (1.0 - r), mask=m)
        carry = a * dh
    tl.store(dh0_ptr + b * D + d, carry, mask=m)
    tl.store(part_ptr + b * D + d, drate, mask=m)


class RGLRU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, decay_gate, input_gate, lam, h0, starts):
        B, T, D = x.shape
        x, decay_gate, input_gate, h0 = (t.contiguous() for t in (x, decay_gate, input_gate, h0))
        starts = starts.to(torch.int32).contiguous()
        rate = C * torch.nn.functional.softplus(lam)
        h = torch.empty_like(x)
        _fwd_kernel[(B, triton.cdiv(D, BLOCK))](x, decay_gate, input_gate, rate, h0, starts, h, T, D, EPS, BLOCK)
        ctx.save_for_backward(x, decay_gate, input_gate, lam, rate, h0, starts, h)
        return h

    @staticmethod
    def backward(ctx, g):
        x, decay_gate, input_gate, lam, rate, h0, starts, h = ctx.saved_tensors
        B, T, D = x.shape
        dx, dra, dia, dh0 = (torch.empty_like(t) for t in (x, decay_gate, input_gate, h0))
        part = x.new_empty(B, D)
        _bwd_kernel[(B, triton.cdiv(D, BLOCK))](
            x, decay_gate, input_gate, rate, h0, starts, h, g.contiguous(), dx, dra, dia, dh0, part, T, D, EPS, BLOCK
        )  # fmt: skip
        return dx, dra, dia, C * torch.sigmoid(lam) * part.sum(0), dh0, None


def kernel(x, decay_gate, input_gate, lam, h0, starts):
    return RGLRU.apply(x, decay_gate, input_gate, lam, h0, starts)


def target():
    return assay.Target(kernel, golden, cases=[packed, continued], name="rg_lru", outputs=("h",))
