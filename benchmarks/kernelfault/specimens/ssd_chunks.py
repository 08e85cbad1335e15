"""h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t]^T,  y[t] = h[t]^T C[t]: a state space model's dual form, in chunks.

Inside a chunk it is masked attention, y = (C B^T * L * dt) x with L[i, j] = exp(sum of dt A from j + 1 to i); the state
goes from chunk to chunk. Heads share B and C. The backward goes through the chunks from the end.
"""

from __future__ import annotations

import torch

from goldsmith import assay

CHUNK = 4


@assay.case(T=[10], H=[2], P=[3], N=[4])
def tokens(make, T, H, P, N):
    return {
        "x": make.normal(T, H, P), "dt": make.uniform(T, H), "A": -make.uniform(H) - 0.2, "B": make.normal(T, N),
        "C": make.normal(T, N),
    }  # fmt: skip


@assay.case(T=[7], H=[3], P=[2], N=[5])
def small(make, T, H, P, N):
    return tokens[0].draw(make, T, H, P, N)


def golden(x, dt, A, B, C):
    h, rows = torch.zeros(x.shape[1], B.shape[1], x.shape[2], dtype=x.dtype), []
    for t in range(len(x)):
        decay = torch.exp(dt[t] * A)[:, None, None]
        h = decay * h + torch.einsum("h,n,hp->hnp", dt[t], B[t], x[t])
        rows.append(torch.einsum("hnp,n->hp", h, C[t]))
    return torch.stack(rows), h


def chunks(T):
    return [slice(at, min(at + CHUNK, T)) for at in range(0, T, CHUNK)]


def decays(a):
    """exp(a[0] + .. + a[i]), and L: exp(a[j + 1] + .. + a[i]) on and below the diagonal, 0 above it."""
    below = torch.ones(len(a), len(a), dtype=torch.bool).tril()
    between = torch.where(below.tril(-1), a.unsqueeze(1), 0.0).cumsum(0)
    return torch.exp(a.cumsum(0)), torch.where(below, torch.exp(between), 0.0), below


def lower(m, rows):
    """m @ rows for a lower triangle m, of which nothing above the diagonal is read."""
    return torch.stack([m[i, : i + 1] @ rows[: i + 1] for i in range(len(rows))])


def upper(m, rows):
    """m^T @ rows for a lower triangle m."""
    return torch.stack([m[i:, i] @ rows[i:] for i in range(len(rows))])


class SSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C):
        T, H, P = x.shape
        y, begins = torch.empty(T, H, P), torch.empty(len(chunks(T)), H, B.shape[1], P)
        final = torch.empty(H, B.shape[1], P)
        for head in range(H):
            h = torch.zeros(B.shape[1], P)
            for number, now in enumerate(chunks(T)):
                begins[number, head] = h
                xs, step = x[now, head], dt[now, head]
                grown, L, below = decays(step * A[head])
                inside = torch.where(below, C[now] @ B[now].mT, 0.0) * L
                y[now, head] = lower(inside, xs * step.unsqueeze(1)) + grown.unsqueeze(1) * (C[now] @ h)
                to_end = L[-1] * step
                h = grown[-1] * h + (B[now] * to_end.unsqueeze(1)).mT @ xs
            final[head] = h
        ctx.save_for_backward(x, dt, A, B, C, begins)
        return y, final

    @staticmethod
    def backward(ctx, gy, gfinal):
        x, dt, A, B, C, begins = ctx.saved_tensors
        H = x.shape[1]
        dx, ddt, dA = torch.empty(x.shape), torch.empty(dt.shape), torch.zeros(H)
        dB, dC = torch.zeros(B.shape), torch.zeros(C.shape)
        for head in range(H):
            dh = gfinal[head]
            for number, now in reversed(list(enumerate(chunks(len(x))))):
                xs, step, g, h = x[now, head], dt[now, head], gy[now, head], begins[number, head]
                grown, L, below = decays(step * A[head])
                pairs = torch.where(below, C[now] @ B[now].mT, 0.0)
                to_end = L[-1] * step
                towards = B[now] @ dh
                given = (towards * xs).sum(1)
                dinside = torch.where(below, g @ xs.mT, 0.0) * L
                dpairs = dinside * step
                dx[now, head] = upper(pairs * L, g) * step.unsqueeze(1) + to_end.unsqueeze(1) * towards
                back = grown.unsqueeze(1) * (g @ h.mT)
                dC[now] += lower(dpairs, B[now]) + back
                dB[now] += upper(dpairs, C[now]) + to_end.unsqueeze(1) * (xs @ dh.mT)
                moved, past = dpairs * pairs, (back * C[now]).sum(1)
                da = torch.empty(len(step))
                for i in range(len(step)):
                    da[i] = moved[i:, :i].sum() + past[i:].sum() + (to_end * given)[:i].sum()
                da += grown[-1] * (h * dh).sum()
                ddt[now, head] = (dinside * pairs).sum(0) + L[-1] * given + da * A[head]
                dA[head] += (da * step).sum()
                dh = grown[-1] * dh + (C[now] * grown.unsqueeze(1)).mT @ g
        return dx, ddt, dA, dB, dC


def kernel(x, dt, A, B, C):
    return SSD.apply(x, dt, A, B, C)


def target():
    return assay.Target(kernel, golden, cases=[tokens, small], name="ssd_chunks", outputs=("y", "state"))
