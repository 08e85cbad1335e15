"""K[h, l] = 2 Re sum_n C (exp(dt A) - 1) / A exp(dt A l),  A = a_re + i a_im: the convolution kernel of a diagonal SSM.

Only one state of each conjugate pair is stored, hence the 2. Discretisation is plain torch with autograd. The
Vandermonde product over states and places is Triton, float32: forward programs have a block of places and walk over
states, backward programs have a block of states and walk over places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

PLACES, STATES = 16, 4


@assay.case(H=[3], N=[10], L=[41])
def layer(make, H, N, L):
    return {
        "dt": 0.02 + 0.1 * make.uniform(H), "a_re": -0.3 - make.uniform(H, N),
        "a_im": 6 * make.uniform(H, N) + 0.5, "c_re": make.normal(H, N), "c_im": make.normal(H, N), "L": L,
    }  # fmt: skip


@assay.case(H=[2], N=[7], L=[24])
def short(make, H, N, L):
    return {**layer[0].draw(make, H, N, L), "c_re": make.normal(N, H).mT}


def discretise(dt, a_re, a_im, c_re, c_im):
    """(re, im) of C (exp(dt A) - 1) / A, and of dt A."""
    p, w = dt.unsqueeze(1) * a_re, dt.unsqueeze(1) * a_im
    grown = torch.exp(p)
    e_re, e_im = grown * torch.cos(w) - 1, grown * torch.sin(w)
    x, y = c_re * e_re - c_im * e_im, c_re * e_im + c_im * e_re
    size = a_re * a_re + a_im * a_im
    return (x * a_re + y * a_im) / size, (y * a_re - x * a_im) / size, p, w


def golden(dt, a_re, a_im, c_re, c_im, L):
    b_re, b_im, p, w = (t.unsqueeze(-1) for t in discretise(dt, a_re, a_im, c_re, c_im))
    place = torch.arange(L, dtype=dt.dtype, device=dt.device)
    return 2 * (torch.exp(p * place) * (b_re * torch.cos(w * place) - b_im * torch.sin(w * place))).sum(1)


@triton.jit
def _fwd_kernel(re_ptr, im_ptr, p_ptr, w_ptr, k_ptr, N, L, PLACES: tl.constexpr, STATES: tl.constexpr):
    h = tl.program_id(0)
    l = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    place = l.to(tl.float32)[None, :]
    acc = tl.zeros([PLACES], tl.float32)
    for start in range(0, N, STATES):
        n = start + tl.arange(0, STATES)
        re = tl.load(re_ptr + h * N + n, mask=n < N, other=0.0)[:, None]
        im = tl.load(im_ptr + h * N + n, mask=n < N, other=0.0)[:, None]
        p = tl.load(p_ptr + h * N + n, mask=n < N, other=0.0)[:, None]
        w = tl.load(w_ptr + h * N + n, mask=n < N, other=0.0)[:, None]
        acc += tl.sum(tl.exp(p * place) * (re * tl.cos(w * place) - im * tl.sin(w * place)), 0)
    tl.store(k_ptr + h * L + l, 2.0 * acc, mask=l < L)


@triton.jit
def _bwd_kernel(re_ptr, im_ptr, p_ptr, w_ptr, g_ptr, dre_ptr, dim_ptr, dp_ptr, dw_ptr, N, L,
                PLACES: tl.constexpr, STATES: tl.constexpr):  # fmt: skip
    h = tl.program_id(0)
    n = tl.program_id(1) * STATES + tl.arange(0, STATES)
    re = tl.load(re_ptr + h * N + n, mask=n < N, other=0.0)[:, None]
    im = tl.load(im_ptr + h * N + n, mask=n < N, other=0.0)[:, None]
    p = tl.load(p_ptr + h * N + n, mask=n < N, other=0.0)[:, None]
    w = tl.load(w_ptr + h * N + n, mask=n < N, other=0.0)[:, None]
    dre = tl.zeros([STATES], tl.float32)
    dim = tl.zeros([STATES], tl.float32)
    dp = tl.zeros([STATES], tl.float32)
    dw = tl.zeros([STATES], tl.float32)
    for start in range(0, L, PLACES):
        l = start + tl.arange(0, PLACES)
        at = l.to(tl.float32)[None, :]
        g = tl.load(g_ptr + h * L + l, mask=l < L, other=0.0)[None, :]
        scaled = 2.0 * g * tl.exp(p * at)
        cos, sin = tl.cos(w * at), tl.sin(w * at)
        dre += tl.sum(scaled * cos, 1)
        dim -= tl.sum(scaled * sin, 1)
        dp += tl.sum(scaled * at * (re * cos - im * sin), 1)
        dw -= tl.sum(scaled * at * (re * sin + im * cos), 1)
    tl.store(dre_ptr + h * N + n, dre, mask=n < N)
    tl.store(dim_ptr + h * N + n, dim, mask=n < N)
    tl.store(dp_ptr + h * N + n, dp, mask=n < N)
    tl.store(dw_ptr + h * N + n, dw, mask=n < N)


class Vandermonde(torch.autograd.Function):
    @staticmethod
    def forward(ctx, re, im, p, w, L):
        re, im, p, w = re.contiguous(), im.contiguous(), p.contiguous(), w.contiguous()
        H, N = p.shape
        k = p.new_empty(H, L)
        _fwd_kernel[(H, triton.cdiv(L, PLACES))](re, im, p, w, k, N, L, PLACES, STATES)
        ctx.save_for_backward(re, im, p, w)
        return k

    @staticmethod
    def backward(ctx, g):
        re, im, p, w = ctx.saved_tensors
        H, N = p.shape
        grads = [torch.empty_like(p) for _ in range(4)]
        _bwd_kernel[(H, triton.cdiv(N, STATES))](
            re, im, p, w, g.contiguous(), *grads, N, g.shape[1], PLACES, STATES
        )  # fmt: skip
        return *grads, None


def kernel(dt, a_re, a_im, c_re, c_im, L):
    return Vandermonde.apply(*discretise(dt, a_re, a_im, c_re, c_im), L)


def target():
    return assay.Target(kernel, golden, cases=[layer, short], name="s4d_kernel", outputs=("K",))
