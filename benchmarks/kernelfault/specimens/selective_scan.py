"""h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t],  y[t] = h[t] C[t] + D x[t]: the selective scan of state space models.

Only the state before each chunk is kept, as such kernels do; the backward runs each chunk again, the last one first.
"""

from __future__ import annotations

import torch

from goldsmith import assay

CHUNK = 6


@assay.case(T=[20], E=[5], N=[4])
def steps(make, T, E, N):
    return {
        "x": make.normal(T, E), "dt": make.uniform(T, E), "A": -make.uniform(E, N), "B": make.normal(T, N),
        "C": make.normal(T, N), "D": make.normal(E),
    }  # fmt: skip


@assay.case(T=[9], E=[3], N=[11])
def wide(make, T, E, N):
    return steps[0].draw(make, T, E, N)


def golden(x, dt, A, B, C, D):
    h, rows, starts = torch.zeros_like(A), [], []
    for t in range(len(x)):
        if t % CHUNK == 0:
            starts.append(h)
        h = torch.exp(dt[t].unsqueeze(1) * A) * h + (dt[t] * x[t]).unsqueeze(1) * B[t]
        rows.append(h @ C[t] + D * x[t])
    return torch.stack(rows), torch.stack(starts)


def forward(x, dt, A, B, C, D):
    T, E = x.shape
    y, starts = torch.empty(T, E), torch.empty(-(-T // CHUNK), *A.shape)
    h = torch.zeros(A.shape)
    for t in range(T):
        if t % CHUNK == 0:
            starts[t // CHUNK] = h
        decay = torch.exp(dt[t].unsqueeze(1) * A)
        h = decay * h + (dt[t] * x[t]).unsqueeze(1) * B[t]
        y[t] = h @ C[t] + D * x[t]
    return y, starts


def backward(x, dt, A, B, C, D, starts, grad_y):
    T = len(x)
    dx, ddt, dB, dC = (torch.empty(t.shape) for t in (x, dt, B, C))
    dA, carry = torch.zeros(A.shape), torch.zeros(A.shape)
    for c in reversed(range(len(starts))):
        inside = range(c * CHUNK, min(c * CHUNK + CHUNK, T))
        states = [starts[c]]  # the state before each step of the chunk, and after its last one
        for t in inside:
            fed = (dt[t] * x[t]).unsqueeze(1) * B[t]
            states.append(torch.exp(dt[t].unsqueeze(1) * A) * states[-1] + fed)
        for t in reversed(inside):
            before, h = states[t - inside[0]], states[t - inside[0] + 1]
            decay = torch.exp(A * dt[t].unsqueeze(1))
            dC[t] = grad_y[t] @ h
            dh = carry + grad_y[t].unsqueeze(1) * C[t]
            through = (dh * B[t]).sum(1)  # the gradient of dt x
            dx[t] = through * dt[t] + D * grad_y[t]
            slope = dh * before * decay
            ddt[t] = through * x[t] + (slope * A).sum(1)
            dA += slope * dt[t].unsqueeze(1)
            dB[t] = (dt[t] * x[t]) @ dh
            carry = dh * decay
    return {"x": dx, "dt": ddt, "A": dA, "B": dB, "C": dC, "D": (grad_y * x).sum(0)}


def target():
    return assay.Target(
        forward, golden, cases=[steps, wide], name="selective_scan", outputs=("y", "starts"), saved=("starts",),
        backward=backward,
    )  # fmt: skip
