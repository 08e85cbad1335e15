"""LoRA beside sharded weights: the adapter is a plain replica, made on every rank, and its gradients are averaged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget

RANK, SEED, RATE = 3, 1234, 0.1


@assay.case(T=[8], D=[6])
def batch(make, T, D):
    return {"x": make.normal(T, D), "target": make.normal(T, D), "weight": make.normal(D, D, std=D**-0.5)}


def drawn(dim, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(RANK, dim, generator=generator, dtype=torch.float32).to(dtype) * dim**-0.5


def golden(x, target, weight):
    a = drawn(x.shape[1], SEED, x.dtype)
    b = torch.zeros(x.shape[1], RANK, dtype=x.dtype, requires_grad=True)
    with torch.enable_grad():
        y = x @ weight.T + x @ a.T @ b.T
        (db,) = torch.autograd.grad((y - target).square().mean(), b)
    return {"a": a, "b": b.detach() - RATE * db}


class Adapter(nn.Module):
    def __init__(self, dim, seed):
        super().__init__()
        self.a = nn.Parameter(drawn(dim, seed, torch.float32))
        self.b = nn.Parameter(torch.zeros(dim, RANK))

    def forward(self, x):
        return x @ self.a.T @ self.b.T


def step(x, target, weight):
    adapter = Adapter(x.shape[1], SEED + dist.get_rank())  # like torch.manual_seed(seed + rank), for dropout
    for parameter in adapter.parameters():
        dist.broadcast(parameter.data, src=0)
    loss = (x @ weight.T + adapter(x) - target).square().mean()
    loss.backward()
    for parameter in adapter.parameters():
        dist.all_reduce(parameter.grad)
        parameter.data -= RATE * parameter.grad / dist.get_world_size()
    return {"a": adapter.a.data, "b": adapter.b.data}


def target():
    return RankTarget(
        step, golden, cases=batch, backward=None,
        placements={"x": Shard(0), "target": Shard(0), "a": Replicate(), "b": Replicate()},
    )  # fmt: skip
