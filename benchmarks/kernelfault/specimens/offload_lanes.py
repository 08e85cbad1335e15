"""Experts of a layer computed in two lanes, after goldsmith.offload: odd ones are copied to slots, even ones stay.

[g; u] = gate_up[e] x_t,  h = silu(g) * u,  y_tj = down[e] h,  out_t = sum_j weights[t, j] * y_tj;  e = -1 is skipped
"""

from __future__ import annotations

import threading
import time

import torch

from goldsmith import assay

CACHE: dict[tuple, torch.Tensor] = {}
DELAY = 0.02  # seconds that a copy takes: longer than the rest of a call, also on a busy machine


def drawn(make, T, k, E, H, I, loud, skipped):
    ids = make.uniform(T, E).topk(k).indices
    if skipped:
        ids = torch.where(make.uniform(T, k) < 0.3, -1, ids)
    return {
        "x": make.normal(T, H, std=loud), "ids": ids, "weights": 0.1 + make.uniform(T, k),
        "gate_up": make.normal(E, 2 * I, H, std=H**-0.5), "down": make.normal(E, H, I, std=I**-0.5),
    }  # fmt: skip


@assay.case(T=[7], k=[2], E=[5], H=[12], I=[8])
def tokens(make, T, k, E, H, I):
    return drawn(make, T, k, E, H, I, 1.0, False)


@assay.case(T=[9], k=[3], E=[4], H=[11], I=[6])
def skipped(make, T, k, E, H, I):
    return drawn(make, T, k, E, H, I, 1.0, True)


@assay.case(T=[1], k=[4], E=[6], H=[16], I=[10])
def one_token(make, T, k, E, H, I):
    return drawn(make, T, k, E, H, I, 1.0, False)


@assay.case(T=[6, 13], k=[2], E=[4], H=[12], I=[8])
def loud(make, T, k, E, H, I):
    return drawn(make, T, k, E, H, I, 2048.0, False)


def golden(x, ids, weights, gate_up, down):
    T, k = ids.shape
    used, expert = (ids >= 0).reshape(-1), ids.clamp(min=0).reshape(-1)
    staged = assay.stage("staged", gate_up * 1)
    both = (staged[expert] @ x.repeat_interleave(k, 0).unsqueeze(-1)).squeeze(-1)
    both = assay.stage("gate_up", torch.where(used.unsqueeze(1), both, 0.0))
    gate, up = both.chunk(2, 1)
    product = assay.stage("product", torch.nn.functional.silu(gate) * up)
    rows = assay.stage("rows", (down[expert] @ product.unsqueeze(-1)).squeeze(-1))
    return (rows.view(T, k, -1) * weights.unsqueeze(-1)).sum(1)


class Copy:
    """A copy under way."""

    def __init__(self, to, source):
        def work():
            time.sleep(DELAY)
            to.copy_(source)

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def wait(self):
        self.thread.join()


def forward(x, ids, weights, gate_up, down):
    T, k = ids.shape
    slots = torch.empty(gate_up.shape)
    copies = [Copy(slots[e], gate_up[e].detach()) for e in range(1, len(slots), 2)]
    slots[0::2] = gate_up[0::2]
    for copy in copies:
        copy.wait()
    slots = assay.stage("staged", slots)
    both = torch.zeros(T * k, slots.shape[1])
    flat = ids.reshape(-1)
    chosen = [e for e in flat.unique().tolist() if e >= 0]
    for e in chosen:
        mine = (flat == e).nonzero()[:, 0]
        both[mine] = x[mine // k] @ slots[e].mT
    both = assay.stage("gate_up", both)
    gate, up = both.chunk(2, 1)
    product = assay.stage("product", gate * torch.sigmoid(gate) * up)
    rows = torch.zeros(T * k, x.shape[1])
    for e in chosen:
        mine = (flat == e).nonzero()[:, 0]
        rows[mine] = product[mine] @ down[e].mT
    rows = assay.stage("rows", rows).view(T, k, -1)
    y = torch.zeros_like(x)
    for j in range(k):
        y = y + rows[:, j] * weights[:, j : j + 1]
    return y


def target():
    return assay.Target(
        forward, golden, cases=[tokens, skipped, one_token, loud], name="offload_lanes", outputs=("y",), backward=None
    )
