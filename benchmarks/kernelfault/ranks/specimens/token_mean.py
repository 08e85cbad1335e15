"""Supervised fine-tuning under DDP: the loss is the mean over all tokens of all ranks that have a label."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget


@assay.case(T=[12], D=[6], V=[10])
def batch(make, T, D, V):
    labels = make.integers(0, V, T)
    labels[[0, 1, 2, 4, 9]] = -100  # prompts and padding, unevenly over ranks
    return {"hidden": make.normal(T, D), "labels": labels, "weight": make.normal(V, D, std=D**-0.5)}


def golden(hidden, labels, weight):
    weight = weight.detach().requires_grad_()
    with torch.enable_grad():
        loss = F.cross_entropy(hidden @ weight.T, labels, ignore_index=-100)
        (dweight,) = torch.autograd.grad(loss, weight)
    return {"loss": loss.detach(), "dweight": dweight}


def step(hidden, labels, weight):
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    head.weight.data.copy_(weight)
    model = DistributedDataParallel(head)
    total = F.cross_entropy(model(hidden), labels, ignore_index=-100, reduction="sum")
    count = (labels != -100).sum()
    dist.all_reduce(count)
    loss = total * dist.get_world_size() / count  # DDP takes the mean over ranks
    loss.backward()
    reported = loss.detach().clone()
    dist.all_reduce(reported)
    return {"loss": reported / dist.get_world_size(), "dweight": head.weight.grad}


def target():
    return RankTarget(
        step, golden, cases=batch, backward=None,
        placements={"hidden": Shard(0), "labels": Shard(0), "loss": Replicate(), "dweight": Replicate()},
    )  # fmt: skip
