"""Experts over ranks by grouped products, which do not write the rows of other ranks' experts."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget


@assay.case(T=[9], D=[6], E=[4], H=[5], K=[2])
def tokens(make, T, D, E, H, K):
    ids = torch.stack([make.permutation(E)[:K] for _ in range(T)])
    return {
        "x": make.normal(T, D), "scores": make.uniform(T, K), "ids": ids,
        "up": make.normal(E, H, D, std=D**-0.5), "down": make.normal(E, D, H, std=H**-0.5),
    }  # fmt: skip


def golden(x, scores, ids, up, down):
    hidden = torch.relu(torch.einsum("tkhd,td->tkh", up[ids], x))
    return {"y": torch.einsum("tkdh,tkh,tk->td", down[ids], hidden, scores)}


def grouped_mm(rows, weights, offsets):
    """Row i times the weight of its group, as torch._grouped_mm: rows behind the last group are not written."""
    out = rows.new_empty(len(rows), weights.shape[1])
    first = 0
    for weight, last in zip(weights, offsets.tolist(), strict=True):
        out[first:last] = rows[first:last] @ weight.T
        first = last
    return out


@torch.no_grad()
def experts(x, scores, ids, up, down):
    T, K, own = *ids.shape, len(up)
    local = ids.reshape(-1) - dist.get_rank() * own
    local = torch.where((local < 0) | (local >= own), own, local)  # the sentinel
    weight = torch.where(local < own, scores.reshape(-1), 0.0)
    order = local.argsort(stable=True)
    offsets = torch.bincount(local, minlength=own + 1)[:own].cumsum(0)
    sentinel = (local[order] == own)[:, None]
    rows = x.repeat_interleave(K, 0)[order]
    hidden = torch.relu(grouped_mm(rows, up, offsets).masked_fill(sentinel, 0.0))
    out = grouped_mm(hidden, down, offsets).masked_fill(sentinel, 0.0)
    out = out * weight[order, None]
    y = torch.empty_like(out).index_copy(0, order, out).reshape(T, K, -1).sum(1)
    dist.all_reduce(y)
    return {"y": y}


def target():
    return RankTarget(
        experts, golden, cases=tokens, backward=None,
        placements={"up": Shard(0), "down": Shard(0), "y": Replicate()},
    )  # fmt: skip
