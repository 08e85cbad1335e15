"""adv[t] = r[t] + gamma (1 - done[t]) v[t+1] - v[t] + gamma lam (1 - done[t]) adv[t+1], ret = adv + v: GAE.

T steps of N environments, v with one step more. Forward and backward in Triton, float32: a program has a block of
environments and goes over time, backwards in the forward and forwards in the backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK = 4


@assay.case(T=[6], N=[7])
def rollouts(make, T, N):
    done = (make.uniform(T, N) < 0.25).to(torch.int32)
    done[2, 0], done[T - 1, 1], done[0, N - 1], done[0, 0] = 1, 1, 1, 0
    return {
        "reward": make.normal(T, N), "value": make.normal(T + 1, N), "done": done, "gamma": 0.9, "lam": 0.8,
    }  # fmt: skip


@assay.case(T=[9], N=[3])
def long(make, T, N):
    return {**rollouts[0].draw(make, T, N), "gamma": 0.97, "lam": 0.6}


def golden(reward, value, done, gamma, lam):
    goes_on = 1.0 - done.to(reward.dtype)
    adv, out = torch.zeros_like(reward[0]), []
    for t in reversed(range(len(reward))):
        delta = reward[t] + gamma * goes_on[t] * value[t + 1] - value[t]
        adv = delta + gamma * lam * goes_on[t] * adv
        out.append(adv)
    adv = torch.stack(out[::-1])
    return adv, adv + value[:-1]


@triton.jit
def _forward(r_ptr, v_ptr, done_ptr, adv_ptr, ret_ptr, T, N, gamma, lam, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    adv = tl.zeros([BLOCK], tl.float32)
    after = tl.load(v_ptr + T * N + n, mask=inside, other=0.0)
    for back in range(T):
        t = T - 1 - back
        now = tl.load(v_ptr + t * N + n, mask=inside, other=0.0)
        r = tl.load(r_ptr + t * N + n, mask=inside, other=0.0)
        goes_on = 1.0 - tl.load(done_ptr + t * N + n, mask=inside, other=0).to(tl.float32)
        delta = r + gamma * goes_on * after - now
        adv = delta + gamma * lam * goes_on * adv
        tl.store(adv_ptr + t * N + n, adv, mask=inside)
        tl.store(ret_ptr + t * N + n, adv + now, mask=inside)
        after = now


@triton.jit
def _backward(ga_ptr, gr_ptr, done_ptr, dr_ptr, dv_ptr, T, N, gamma, lam, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    carry, owed = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for t in range(T):
        gr = tl.load(gr_ptr + t * N + n, mask=inside, other=0.0)
        carry += tl.load(ga_ptr + t * N + n, mask=inside, other=0.0) + gr
        goes_on = 1.0 - tl.load(done_ptr + t * N + n, mask=inside, other=0).to(tl.float32)
        tl.store(dr_ptr + t * N + n, carry, mask=inside)
        tl.store(dv_ptr + t * N + n, gr - carry + owed, mask=inside)
        owed = gamma * goes_on * carry
        carry = lam * owed
    tl.store(dv_ptr + T * N + n, owed, mask=inside)


class GAE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, reward, value, done, gamma, lam):
        reward, value, done = reward.contiguous(), value.contiguous(), done.contiguous()
        T, N = reward.shape
        adv, ret = torch.empty_like(reward), torch.empty_like(reward)
        _forward[(triton.cdiv(N, BLOCK),)](reward, value, done, adv, ret, T, N, gamma, lam, BLOCK)
        ctx.save_for_backward(done)
        ctx.gamma, ctx.lam = gamma, lam
        return adv, ret

    @staticmethod
    def backward(ctx, grad_adv, grad_ret):
        (done,) = ctx.saved_tensors
        T, N = done.shape
        dr, dv = grad_adv.new_empty(T, N), grad_adv.new_empty(T + 1, N)
        ga, gr = grad_adv.contiguous(), grad_ret.contiguous()
        _backward[(triton.cdiv(N, BLOCK),)](ga, gr, done, dr, dv, T, N, ctx.gamma, ctx.lam, BLOCK)
        return dr, dv, None, None, None


def kernel(reward, value, done, gamma, lam):
    return GAE.apply(reward, value, done, gamma, lam)


def target():
    return assay.Target(kernel, golden, cases=[rollouts, long], name="gae", outputs=("adv", "ret"))
