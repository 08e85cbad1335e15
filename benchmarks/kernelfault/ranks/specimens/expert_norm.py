"""Gradient clipping with expert parallelism: dense gradients are replicas, every rank has experts of its own."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget

MAX_NORM = 1.0


@assay.case(D=[6], E=[4])
def gradients(make, D, E):
    return {"dense": make.normal(D, D), "experts": make.normal(E, D, D, std=2.0)}


def golden(dense, experts):
    norm = (dense.square().sum() + experts.square().sum()).sqrt()
    scale = (MAX_NORM / norm).clamp(max=1.0)
    return {"norm": norm, "dense_clipped": dense * scale, "experts_clipped": experts * scale}


def squares(gradients):
    return torch.stack([g.float().square().sum() for g in gradients]).sum()


def clip(dense, experts):
    dense, experts = [dense.clone()], list(experts.clone())
    expert_squares = squares(experts)
    dist.all_reduce(expert_squares)
    norm = (squares(dense) + expert_squares).sqrt()
    scale = (MAX_NORM / norm).clamp(max=1.0)
    for gradient in (*dense, *experts):
        gradient.mul_(scale)
    return {"norm": norm, "dense_clipped": dense[0], "experts_clipped": torch.stack(experts)}


def target():
    return RankTarget(
        clip, golden, cases=gradients, backward=None,
        placements={
            "dense": Replicate(), "experts": Shard(0), "norm": Replicate(), "dense_clipped": Replicate(),
            "experts_clipped": Shard(0),
        },
    )  # fmt: skip
