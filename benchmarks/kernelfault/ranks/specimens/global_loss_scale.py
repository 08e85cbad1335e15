"""FSDP2 with a loss normalised by the tokens of all ranks: FSDP's mean over ranks must be undone."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget


@assay.case(T=[12], D=[6], V=[8])
def batch(make, T, D, V):
    mask = torch.ones(T, dtype=torch.int64)
    mask[[1, 2, 3, 8]] = 0
    return {
        "hidden": make.normal(T, D), "labels": make.integers(0, V, T), "mask": mask,
        "weight": make.normal(V, D, std=D**-0.5),
    }  # fmt: skip


def golden(hidden, labels, mask, weight):
    weight = weight.detach().requires_grad_()
    with torch.enable_grad():
        losses = F.cross_entropy(hidden @ weight.T, labels, reduction="none")
        loss = (losses * mask).sum() / mask.sum()
        (dweight,) = torch.autograd.grad(loss, weight)
    return {"loss": loss.detach(), "dweight": dweight}


def reduced_metrics(loss_sum, token_count):
    metrics = torch.stack((loss_sum.detach(), token_count.to(loss_sum.dtype)))
    dist.all_reduce(metrics)
    return metrics[0], metrics[1], dist.get_world_size()


def step(hidden, labels, mask, weight, mesh):
    drafter = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    drafter.weight.data.copy_(weight)
    fully_shard(drafter, mesh=mesh)
    losses = F.cross_entropy(drafter(hidden), labels, reduction="none")
    loss_sum = (losses * mask).sum()
    total, tokens, ranks = reduced_metrics(loss_sum, mask.sum())
    loss = loss_sum * (ranks / tokens)
    loss.backward()
    return {"loss": total / tokens, "dweight": drafter.weight.grad.to_local()}


def target():
    shards = dict.fromkeys(("hidden", "labels", "mask", "dweight"), Shard(0))
    return RankTarget(
        step, golden, cases=batch, backward=None, placements={**shards, "loss": Replicate()}, mesh={"dp": -1}
    )
