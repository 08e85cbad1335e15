"""h[t] = (1-z) n + z h[t-1],  n = tanh(x_n + r (h[t-1] W_n + b_n)): a GRU over time with saved gates, backward by hand.

x comes projected (r, z and n beside each other). The reset gate comes after the product and its bias, as in cuDNN.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(T=[6], B=[3], H=[5])
def sequences(make, T, B, H):
    return {
        "x": make.normal(T, B, 3 * H), "h0": make.normal(B, H), "w": make.normal(H, 3 * H, std=0.5),
        "b": make.normal(3 * H),
    }  # fmt: skip


@assay.case(T=[11], B=[2], H=[3])
def long(make, T, B, H):
    return sequences[0].draw(make, T, B, H)


def golden(x, h0, w, b):
    h, rows, kept = h0, [], []
    for step in x:
        x_r, x_z, x_n = step.chunk(3, -1)
        h_r, h_z, h_n = (h @ w + b).chunk(3, -1)
        r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + r * h_n)
        h = (1 - z) * n + z * h
        rows.append(h)
        kept.append(torch.cat((r, z, n, h_n), -1))
    return torch.stack(rows), torch.stack(kept)


def forward(x, h0, w, b):
    T, B, H = *x.shape[:2], h0.shape[1]
    y, gates = torch.empty(T, B, H), torch.empty(T, B, 4 * H)
    h = h0
    for t in range(T):
        projected = torch.addmm(b, h, w)
        r = torch.sigmoid(x[t, :, :H] + projected[:, :H])
        z = torch.sigmoid(x[t, :, H : 2 * H] + projected[:, H : 2 * H])
        h_n = projected[:, 2 * H :]
        n = torch.tanh(x[t, :, 2 * H :] + r * h_n)
        h = n + z * (h - n)
        y[t] = h
        gates[t] = torch.cat((r, z, n, h_n), 1)
    return y, gates


def backward(x, h0, w, b, y, gates, grad_y):
    T, H = len(x), h0.shape[1]
    dx, dw, db = torch.empty(x.shape), torch.zeros(w.shape), torch.zeros(b.shape)
    carry = torch.zeros(h0.shape)
    for t in reversed(range(T)):
        r, z, n, h_n = gates[t].split(H, 1)
        before = y[t - 1] if t > 0 else h0
        dh = grad_y[t] + carry
        dn = dh * (1 - z) * (1 - n * n)
        dz = dh * (before - n) * z * (1 - z)
        dr = dn * h_n * r * (1 - r)
        dprojected = torch.cat((dr, dz, dn * r), 1)
        dx[t] = torch.cat((dr, dz, dn), 1)
        dw += before.mT @ dprojected
        db += dprojected.sum(0)
        carry = dh * z + dprojected @ w.mT
    return {"x": dx, "h0": carry, "w": dw, "b": db}


def target():
    return assay.Target(
        forward, golden, cases=[sequences, long], name="gru_cell", outputs=("y", "gates"), saved=("gates",),
        backward=backward,
    )  # fmt: skip
