"""Rows of experts are added to their tokens with a weight; and the mean row of each expert, 0 for one without rows."""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(P=[30], T=[12], E=[4], D=[10])
def pairs(make, P, T, E, D):
    return {
        "rows": make.normal(P, D), "weight": make.uniform(P), "token": make.integers(0, T, P),
        "offsets": make.offsets(E, P, empty=0), "T": T,
    }  # fmt: skip


@assay.case(P=[17], T=[5], E=[6], D=[7])
def empty_expert(make, P, T, E, D):
    return {**pairs[0].draw(make, P, T, E, D), "offsets": make.offsets(E, P, empty=2)}


@assay.case(P=[24], T=[30], E=[3], D=[16])
def empty_sparse(make, P, T, E, D):
    return {**pairs[0].draw(make, P, T, E, D), "offsets": make.offsets(E, P, empty=1)}


@assay.case(P=[0], T=[4], E=[3], D=[5])
def no_rows(make, P, T, E, D):
    return pairs[0].draw(make, P, T, E, D)


def golden(rows, weight, token, offsets, T):
    y = torch.zeros(T, rows.shape[1], dtype=rows.dtype).index_add(0, token, rows * weight.unsqueeze(1))
    counts = offsets.diff()
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    total = assay.stage("total", torch.zeros(len(counts), rows.shape[1], dtype=rows.dtype).index_add(0, owner, rows))
    return y, total / counts.clamp(min=1).unsqueeze(1)


def forward(rows, weight, token, offsets, T):
    y = torch.zeros(T, rows.shape[1])
    y.index_add_(0, token, rows * weight.unsqueeze(1))
    ends = offsets.tolist()
    counts = offsets.diff()
    total = torch.stack([rows[lo:hi].sum(0) for lo, hi in zip(ends, ends[1:], strict=False)])
    total = assay.stage("total", total)
    return y, total * (1 / counts.clamp(min=1)).unsqueeze(1)


def target():
    return assay.Target(
        forward, golden, cases=[pairs, empty_expert, empty_sparse, no_rows], name="combine", outputs=("y", "mean"),
        backward=None,
    )  # fmt: skip
