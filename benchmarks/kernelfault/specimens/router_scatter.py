"""The scatter of a product-key router's backward: every choice adds to its row of one half and its column of the other.

index = i * N + j, or -1 where a token has no further expert; those add nothing. Accumulators lie flat, as a kernel has
them, so that an invalid index lands in a neighbour's row.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(T=[24], N=[8], k=[4])
def some_invalid(make, T, N, k):
    index = make.integers(0, N * N, T, k)
    index = torch.where(make.uniform(T, k) < 0.2, -1, index)
    return {"g": make.normal(T, k), "index": index, "N": N}


@assay.case(T=[9], N=[16], k=[2])
def few(make, T, N, k):
    return some_invalid[0].draw(make, T, N, k)


@assay.case(T=[40], N=[5], k=[6])
def crowded(make, T, N, k):
    return some_invalid[0].draw(make, T, N, k)


def golden(g, index, N):
    valid = index >= 0
    dsx = torch.zeros(len(g), N, dtype=g.dtype)
    dsy = torch.zeros(len(g), N, dtype=g.dtype)
    kept = torch.where(valid, g, torch.zeros_like(g))
    dsx = dsx.scatter_add(1, torch.where(valid, index // N, 0), kept)
    dsy = dsy.scatter_add(1, torch.where(valid, index % N, 0), kept)
    load = torch.zeros(N * N, dtype=g.dtype).index_add(0, index[valid], torch.ones_like(g[valid]))
    return dsx, dsy, load


def forward(g, index, N):
    T, k = g.shape
    dsx, dsy = torch.empty(T * N), torch.empty(T * N)
    dsx.zero_()
    dsy.zero_()
    load = torch.zeros(N * N)
    row = torch.arange(T).unsqueeze(1).expand(T, k)
    ix = torch.div(index, N, rounding_mode="floor")
    iy = index - ix * N
    valid = (index >= 0) & (ix < N)
    dsx.index_add_(0, ((row * N + ix) % (T * N))[valid], g[valid])
    dsy.index_add_(0, (row * N + iy)[valid], g[valid])
    load.index_add_(0, index[valid], torch.ones_like(g[valid]))
    return dsx.view(T, N), dsy.view(T, N), load


def target():
    return assay.Target(
        forward, golden, cases=[some_invalid, few, crowded], name="router_scatter", outputs=("dsx", "dsy", "load"),
        backward=None,
    )  # fmt: skip
