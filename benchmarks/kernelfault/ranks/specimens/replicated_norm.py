"""The norm of gradients under tensor parallelism: weights are sharded, norms' weights are the same on all ranks."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget


@assay.case(D=[8], H=[12])
def gradients(make, D, H):
    return {"q_norm": make.normal(D, std=3.0), "up": make.normal(H, D), "down": make.normal(D, H)}


def golden(q_norm, up, down):
    return {"norm": (q_norm.square().sum() + up.square().sum() + down.square().sum()).sqrt()}


def is_replicated(gradient):
    return gradient.dim() == 1


def grad_norm(q_norm, up, down):
    sharded, replicated = torch.zeros(()), torch.zeros(())
    for gradient in (q_norm, up, down):
        squares = gradient.float().square().sum()
        if is_replicated(gradient):
            replicated += squares
        else:
            sharded += squares
    dist.all_reduce(sharded)
    return {"norm": (sharded + replicated).sqrt()}


def target():
    return RankTarget(
        grad_norm, golden, cases=gradients, backward=None,
        placements={"q_norm": Replicate(), "up": Shard(0), "down": Shard(1), "norm": Replicate()},
    )  # fmt: skip
