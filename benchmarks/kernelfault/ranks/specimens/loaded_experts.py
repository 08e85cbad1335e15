"""Weights are loaded on rank 0 and broadcast, and every rank keeps its own experts."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget


@assay.case(T=[7], D=[5], E=[4])
def tokens(make, T, D, E):
    return {
        "x": make.normal(T, D), "router": make.normal(E, D), "experts": make.normal(E, D, D, std=D**-0.5),
    }  # fmt: skip


def golden(x, router, experts):
    scores = torch.softmax(x @ router.T, -1)
    return {"y": torch.einsum("te,eod,td->to", scores, experts, x)}


class Layer(nn.Module):
    def __init__(self, router, experts):
        super().__init__()
        self.router = nn.Parameter(router.clone() if dist.get_rank() == 0 else torch.empty_like(router))
        self.experts = nn.Parameter(experts.clone())
        self.experts.is_expert = True

    def forward(self, x):
        own, first = len(self.experts), dist.get_rank() * len(self.experts)
        scores = torch.softmax(x @ self.router.T, -1)[:, first : first + own]
        y = torch.einsum("te,eod,td->to", scores, self.experts, x)
        dist.all_reduce(y)
        return y


def sync_module_states(model):
    for parameter in model.parameters():
        if not getattr(parameter, "is_expert", False):
            dist.broadcast(parameter.data, src=0)


@torch.no_grad()
def loaded(x, router, experts):
    model = Layer(router, experts)
    sync_module_states(model)
    return {"y": model(x)}


def target():
    return RankTarget(
        loaded, golden, cases=tokens, backward=None, placements={"experts": Shard(0), "y": Replicate()}
    )  # fmt: skip
