"""S[t] = a[t] S[t-1] + b[t] n[t] (v[t] - a[t] S[t-1]^T n[t])^T,  y[t] = S[t]^T q[t],  n = k / |k|: a gated delta rule.

The state is corrected at each step by what it says wrongly about the key; a and b are sigmoids of two gates. Saved are
states at the beginning of chunks; the backward runs each chunk again and goes through its steps from the end.
"""

from __future__ import annotations

import torch

from goldsmith import assay

CHUNK = 3


@assay.case(H=[2], T=[5], D=[4], E=[3])
def heads(make, H, T, D, E):
    return {
        "q": make.normal(H, T, D), "k": make.normal(H, T, D), "v": make.normal(H, T, E), "fade": make.normal(H, T),
        "rate": make.normal(H, T), "start": make.normal(H, D, E), "eps": 0.01,
    }  # fmt: skip


@assay.case(H=[1], T=[7], D=[3], E=[4])
def single(make, H, T, D, E):
    return heads[0].draw(make, H, T, D, E)


def golden(q, k, v, fade, rate, start, eps):
    a, b = torch.sigmoid(fade), torch.sigmoid(rate)
    n = k / torch.sqrt(k.square().sum(-1, keepdim=True) + eps)
    state, rows = start, []
    for t in range(q.shape[1]):
        state = a[:, t, None, None] * state
        wrong = v[:, t] - torch.einsum("hde,hd->he", state, n[:, t])
        state = state + b[:, t, None, None] * n[:, t, :, None] * wrong[:, None, :]
        rows.append(torch.einsum("hde,hd->he", state, q[:, t]))
    return torch.stack(rows, 1), state


def step(state, n, v, a, b):
    """The state before and after the write, and the error between."""
    faded = a.view(-1, 1, 1) * state
    error = v - (faded * n.unsqueeze(-1)).sum(1)
    return faded, error, faded + (b.unsqueeze(-1) * n).unsqueeze(-1) * error.unsqueeze(1)


class DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, fade, rate, start, eps):
        H, T, D = q.shape
        a, b = torch.sigmoid(fade), torch.sigmoid(rate)
        inverse = torch.rsqrt((k * k).sum(-1, keepdim=True) + eps)
        n = k * inverse
        y, state = torch.empty(v.shape), start
        begins = torch.empty(-(-T // CHUNK), H, D, v.shape[2])
        for chunk in range(len(begins)):
            begins[chunk] = state
            for t in range(chunk * CHUNK, min((chunk + 1) * CHUNK, T)):
                _, _, state = step(state, n[:, t], v[:, t], a[:, t], b[:, t])
                y[:, t] = (state * q[:, t].unsqueeze(-1)).sum(1)
        ctx.save_for_backward(q, n, inverse, v, a, b, begins)
        return y, state.clone()

    @staticmethod
    def backward(ctx, gy, gstate):
        q, n, inverse, v, a, b, begins = ctx.saved_tensors
        T = q.shape[1]
        dq, dn, dv = torch.empty(q.shape), torch.empty(n.shape), torch.empty(v.shape)
        da, db = torch.empty(a.shape), torch.empty(b.shape)
        ds = gstate.clone()
        for chunk in reversed(range(len(begins))):
            steps = range(chunk * CHUNK, min((chunk + 1) * CHUNK, T))
            states, state = [], begins[chunk]
            for t in steps:
                faded, error, after = step(state, n[:, t], v[:, t], a[:, t], b[:, t])
                states.append((state, faded, error, after))
                state = after
            for t, (before, faded, error, after) in zip(reversed(steps), reversed(states), strict=True):
                g = gy[:, t].unsqueeze(1)
                dq[:, t] = (after * g).sum(-1)
                ds = ds + q[:, t].unsqueeze(-1) * g
                towards = (ds * error.unsqueeze(1)).sum(-1)
                db[:, t] = (towards * n[:, t]).sum(-1)
                derror = b[:, t].unsqueeze(-1) * (ds * n[:, t].unsqueeze(-1)).sum(1)
                dv[:, t] = derror
                dn[:, t] = b[:, t].unsqueeze(-1) * towards - (faded * derror.unsqueeze(1)).sum(-1)
                dfaded = ds - n[:, t].unsqueeze(-1) * derror.unsqueeze(1)
                da[:, t] = (dfaded * before).sum((1, 2))
                ds = a[:, t].view(-1, 1, 1) * dfaded
        dk = inverse * (dn - n * (dn * n).sum(-1, keepdim=True))
        return dq, dk, dv, da * a * (1 - a), db * b * (1 - b), ds, None


def kernel(q, k, v, fade, rate, start, eps):
    return DeltaRule.apply(q, k, v, fade, rate, start, eps)


def target():
    return assay.Target(kernel, golden, cases=[heads, single], name="delta_rule", outputs=("y", "state"))
