"""h[t] = decay[t] h[t-1] + gate[t] x[t],  y = h * out; the scan and its backward by hand."""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(T=[16], D=[10])
def steps(make, T, D):
    return {
        "x": make.normal(T, D), "decay": make.uniform(T, D), "gate": make.uniform(T, D), "out": make.normal(D),
    }  # fmt: skip


@assay.case(T=[7], D=[33])
def wide(make, T, D):
    return steps[0].draw(make, T, D)


@assay.case(T=[29], D=[4])
def long(make, T, D):
    return steps[0].draw(make, T, D)


def golden(x, decay, gate, out):
    fed = assay.stage("fed", gate * x)
    rows, h = [], torch.zeros_like(x[0])
    for t in range(len(x)):
        h = decay[t] * h + fed[t]
        rows.append(h)
    h = assay.stage("h", torch.stack(rows))
    return h * out, h


def forward(x, decay, gate, out):
    fed = assay.stage("fed", gate * x)
    h = torch.empty(x.shape)
    state = torch.zeros(x.shape[1])
    for t in range(len(x)):
        state = torch.addcmul(fed[t], decay[t], state)
        h[t] = state
    h = assay.stage("h", h)
    return h * out, h.clone()


def backward(x, decay, gate, out, h, grad_y):
    dh = assay.stage("h.grad", grad_y * out)
    dfed, ddecay = torch.empty(x.shape), torch.zeros(x.shape)
    carry = torch.zeros(x.shape[1])
    for t in range(len(x) - 1, -1, -1):
        carry = carry + dh[t]
        dfed[t] = carry
        if t > 0:
            ddecay[t] = carry * h[t - 1]
        carry = carry * decay[t]
    dfed = assay.stage("fed.grad", dfed)
    return {"x": dfed * gate, "decay": ddecay, "gate": dfed * x, "out": (grad_y * h).sum(0)}


def target():
    return assay.Target(
        forward, golden, cases=[steps, wide, long], name="gated_scan", outputs=("y", "h"), saved=("h",),
        backward=backward,
    )  # fmt: skip
