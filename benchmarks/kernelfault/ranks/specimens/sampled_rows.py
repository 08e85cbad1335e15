"""One epoch of one data set that all ranks can read: a sampler gives every rank rows of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget


@assay.case(T=[12], D=[5])
def rows(make, T, D):
    return {"x": make.normal(T, D), "target": make.normal(T), "weight": make.normal(D)}


def golden(x, target, weight):
    weight = weight.detach().requires_grad_()
    with torch.enable_grad():
        (dweight,) = torch.autograd.grad((x @ weight - target).square().mean(), weight)
    return {"dweight": dweight}


def step(x, target, weight):
    data, world = TensorDataset(x, target), dist.get_world_size()
    sampler = DistributedSampler(data, num_replicas=world, rank=dist.get_rank(), shuffle=False)
    loader = DataLoader(data, batch_size=len(data) // world, sampler=sampler)
    weight = nn.Parameter(weight.clone())
    own_x, own_target = next(iter(loader))
    (own_x @ weight - own_target).square().mean().backward()
    dist.all_reduce(weight.grad)
    return {"dweight": weight.grad / world}


def target():
    return RankTarget(step, golden, cases=rows, backward=None, placements={"dweight": Replicate()})
