"""y = table[index] * scale from a table that lies far into a large buffer: offsets begin at `base` elements.

A CPU test has no table of 2^31 elements, so that only the offsets are large.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(T=[40], D=[16], P=[20])
def rows(make, T, D, P):
    return {"table": make.normal(T, D), "index": make.integers(0, T, P), "base": 2**31 - T * D // 2, "scale": 0.5}


@assay.case(T=[64], D=[9], P=[33])
def odd(make, T, D, P):
    return rows[0].draw(make, T, D, P)


@assay.case(T=[21], D=[50], P=[12])
def wide(make, T, D, P):
    return rows[0].draw(make, T, D, P)


def golden(table, index, base, scale):
    return table[index] * scale


def forward(table, index, base, scale):
    T, D = table.shape
    first = base + index.to(torch.int64) * D
    at = (first.unsqueeze(1) + torch.arange(D) - base) % (T * D)
    return table.reshape(-1)[at] * scale


def target():
    return assay.Target(forward, golden, cases=[rows, odd, wide], name="gather", outputs=("y",), backward=None)
