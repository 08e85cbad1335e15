"""y = (E / (eps + M)^alpha + delta)^r - delta^r,  E = x^2,  M_t = (1 - s) M_{t-1} + s E_t,  M_0 = E_0.

Per-channel energy normalisation of a magnitude spectrogram x [B, T, F], with alpha, delta, r and s learned per channel
(the first three as logarithms, s as a logit). Triton, float32: a program per recording and block of channels walks
over time, and back over time for the gradients. Gradients of the parameters are summed over recordings in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK_F = 8
EPS = 1e-3


@assay.case(B=[2], T=[9], F=[11])
def recordings(make, B, T, F):
    return {
        "x": 0.2 + make.uniform(B, T, F), "log_alpha": -0.2 + make.normal(F, std=0.1),
        "log_delta": 0.5 + make.normal(F, std=0.2), "log_r": -0.7 + make.normal(F, std=0.1), "logit_s": make.normal(F),
    }  # fmt: skip


@assay.case(B=[3], T=[4], F=[8])
def channels_first(make, B, T, F):
    return {**recordings[0].draw(make, B, T, F), "x": (0.3 + make.uniform(B, F, T)).mT}


def golden(x, log_alpha, log_delta, log_r, logit_s):
    alpha, delta, r, s = log_alpha.exp(), log_delta.exp(), log_r.exp(), logit_s.sigmoid()
    energy = x.square()
    smooth = [energy[:, 0]]
    for t in range(1, x.shape[1]):
        smooth.append((1 - s) * smooth[-1] + s * energy[:, t])
    smooth = assay.stage("smooth", torch.stack(smooth, 1))
    level = assay.stage("level", energy * torch.exp(-alpha * torch.log(EPS + smooth)) + delta)
    return torch.exp(r * torch.log(level)) - torch.exp(r * log_delta)


# b recording, t time, f channels
@triton.jit
def _smooth_kernel(x_ptr, logit_s_ptr, smooth_ptr, T, F, BLOCK_F: tl.constexpr):
    b = tl.program_id(0)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    m = f < F
    s = 1.0 / (1.0 + tl.exp(-tl.load(logit_s_ptr + f, mask=m, other=0.0)))
    x = tl.load(x_ptr + b * T * F + f, mask=m, other=0.0)
    state = x * x
    for t in range(0, T):
        at = (b * T + t) * F + f
        x = tl.load(x_ptr + at, mask=m, other=0.0)
        state = (1.0 - s) * state + s * x * x
        tl.store(smooth_ptr + at, state, mask=m)


@triton.jit
def _level_kernel(x_ptr, smooth_ptr, log_alpha_ptr, log_delta_ptr, level_ptr, total, F, eps, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = at < total
    f = at % F
    x = tl.load(x_ptr + at, mask=m, other=0.0)
    smooth = tl.load(smooth_ptr + at, mask=m, other=1.0)
    alpha = tl.exp(tl.load(log_alpha_ptr + f))
    delta = tl.exp(tl.load(log_delta_ptr + f))
    tl.store(level_ptr + at, x * x * tl.exp(-alpha * tl.log(eps + smooth)) + delta, mask=m)


@triton.jit
def _root_kernel(level_ptr, log_delta_ptr, log_r_ptr, y_ptr, total, F, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = at < total
    f = at % F
    level = tl.load(level_ptr + at, mask=m, other=1.0)
    r = tl.exp(tl.load(log_r_ptr + f))
    offset = tl.exp(r * tl.load(log_delta_ptr + f))
    tl.store(y_ptr + at, tl.exp(r * tl.log(level)) - offset, mask=m)


@triton.jit
def _bwd_kernel(g_ptr, x_ptr, smooth_ptr, level_ptr, log_alpha_ptr, log_delta_ptr, log_r_ptr, logit_s_ptr, dx_ptr,
                part_ptr, T, F, eps, BLOCK_F: tl.constexpr):  # fmt: skip
    b = tl.program_id(0)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    m = f < F
    log_delta = tl.load(log_delta_ptr + f, mask=m, other=0.0)
    alpha = tl.exp(tl.load(log_alpha_ptr + f, mask=m, other=0.0))
    delta = tl.exp(log_delta)
    r = tl.exp(tl.load(log_r_ptr + f, mask=m, other=0.0))
    s = 1.0 / (1.0 + tl.exp(-tl.load(logit_s_ptr + f, mask=m, other=0.0)))
    offset = tl.exp(r * log_delta)
    d_alpha = tl.zeros([BLOCK_F], tl.float32)
    d_delta = tl.zeros([BLOCK_F], tl.float32)
    d_r = tl.zeros([BLOCK_F], tl.float32)
    d_s = tl.zeros([BLOCK_F], tl.float32)
    carry = tl.zeros([BLOCK_F], tl.float32)
    for back in range(0, T):
        t = T - 1 - back
        at = (b * T + t) * F + f
        g = tl.load(g_ptr + at, mask=m, other=0.0)
        x = tl.load(x_ptr + at, mask=m, other=0.0)
        smooth = tl.load(smooth_ptr + at, mask=m, other=1.0)
        level = tl.load(level_ptr + at, mask=m, other=1.0)
        log_smooth = tl.log(eps + smooth)
        gain = tl.exp(-alpha * log_smooth)
        power = tl.exp(r * tl.log(level))
        d_level = g * r * power / level
        d_gain = d_level * x * x
        d_alpha -= d_gain * gain * log_smooth
        d_delta += d_level - g * r * offset / delta
        d_r += g * (power * tl.log(level) - offset * log_delta)
        carry -= d_gain * alpha * gain / (eps + smooth)
        before = tl.load(smooth_ptr + at - F, mask=m & (t > 0), other=0.0)
        d_s += tl.where(t > 0, carry * (x * x - before), 0.0)
        share = tl.where(t > 0, s, 1.0)
        tl.store(dx_ptr + at, 2.0 * x * (d_level * gain + carry * share), mask=m)
        carry = carry * (1.0 - s)
    row = part_ptr + b * 4 * F + f
    tl.store(row, d_alpha * alpha, mask=m)
    tl.store(row + F, d_delta * delta, mask=m)
    tl.store(row + 2 * F, d_r * r, mask=m)
    tl.store(row + 3 * F, d_s * s * (1.0 - s), mask=m)


class PCEN(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log_alpha, log_delta, log_r, logit_s):
        x, log_alpha, log_delta = x.contiguous(), log_alpha.contiguous(), log_delta.contiguous()
        log_r, logit_s = log_r.contiguous(), logit_s.contiguous()
        B, T, F = x.shape
        smooth, level, y = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
        _smooth_kernel[(B, triton.cdiv(F, BLOCK_F))](x, logit_s, smooth, T, F, BLOCK_F)
        smooth = assay.stage("smooth", smooth)
        blocks = (triton.cdiv(x.numel(), 64),)
        _level_kernel[blocks](x, smooth, log_alpha, log_delta, level, x.numel(), F, EPS, 64)
        level = assay.stage("level", level)
        _root_kernel[blocks](level, log_delta, log_r, y, x.numel(), F, 64)
        ctx.save_for_backward(x, smooth, level, log_alpha, log_delta, log_r, logit_s)
        return y

    @staticmethod
    def backward(ctx, g):
        x, smooth, level, *parameters = ctx.saved_tensors
        (B, T, F), g = x.shape, g.contiguous()
        dx, part = torch.empty_like(x), x.new_empty(B, 4, F)
        grid = (B, triton.cdiv(F, BLOCK_F))
        _bwd_kernel[grid](g, x, smooth, level, *parameters, dx, part, T, F, EPS, BLOCK_F)
        return dx, *part.sum(0).unbind(0)


def kernel(x, log_alpha, log_delta, log_r, logit_s):
    return PCEN.apply(x, log_alpha, log_delta, log_r, logit_s)


def target():
    return assay.Target(kernel, golden, cases=[recordings, channels_first], name="pcen", outputs=("y",))
