"""A model with hyper-connections cut between two layers, one half on each of two ranks, for ranks to import."""

import torch
from torch import nn
from torch.distributed import all_gather_object, get_rank, get_world_size, group
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from distributed.models import DIM, N
from goldsmith import mhc
from goldsmith.distributed import clip_grad_norm

MICROBATCHES = 4
PER_LAYER = ("fn", "base", "scale", "weight")
OF_HEAD = ("hc_fn", "hc_base", "hc_scale")


def plain_model(x, dy, *parameters):
    """y and all gradients, by the formulas."""
    leaves = [p.detach().requires_grad_() for p in parameters]
    with torch.enable_grad():
        streams = mhc.expand(x, N, backend="reference")
        for fn, base, scale, weight in zip(*[iter(leaves[:-3])] * 4, strict=True):
            h, h_post, h_res = mhc.pre(streams, fn, scale, base, backend="reference")
            streams = mhc.post(streams, h @ weight.T, h_post, h_res, backend="reference")
        head_fn, head_base, head_scale = leaves[-3:]
        y = mhc.head(streams, head_fn, head_scale, head_base, backend="reference")
        gradients = torch.autograd.grad(y, leaves, dy)
    return (y.detach(), *gradients)


class Stage(nn.Module):
    """Every stage but the first receives [..., n, dim], and every one but the last sends it."""

    def __init__(self, blocks, *, first, last):
        super().__init__()
        self.first, self.stack = first, mhc.HyperStack(blocks)
        self.head = mhc.HyperHead(DIM, n=N) if last else None

    def forward(self, x):
        x = self.stack(mhc.expand(x, N) if self.first else x)
        return x if self.head is None else self.head(x)


def pipelined(x, dy, *parameters):
    rank, world = get_rank(), get_world_size()
    layers = list(zip(*[iter(parameters[:-3])] * 4, strict=True))
    own = layers[rank * len(layers) // world : (rank + 1) * len(layers) // world]
    blocks = [mhc.HyperConnection(DIM, nn.Linear(DIM, DIM, bias=False), n=N) for _ in own]
    for block, values in zip(blocks, own, strict=True):
        names = (*PER_LAYER[:3], "layer.weight")
        block.load_state_dict(dict(zip(names, (v.float() for v in values), strict=True)))
    model = Stage(blocks, first=rank == 0, last=rank == world - 1)
    if model.head is not None:
        model.head.load_state_dict(dict(zip(OF_HEAD, (p.float() for p in parameters[-3:]), strict=True)))
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=lambda y, target: (y * target).sum(), scale_grads=False)
    if rank == 0:
        schedule.step(x)
        results = []
    else:
        losses = []
        y = schedule.step(target=dy, losses=losses)
        assert len(losses) == MICROBATCHES
        results = [y.detach()]
    gradients = [p.grad for block in blocks for p in (block.fn, block.base, block.scale, block.layer.weight)]
    gradients += [getattr(model.head, name).grad for name in OF_HEAD] if model.head is not None else []
    norms = [None] * world
    all_gather_object(norms, [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in model.parameters()])
    total = clip_grad_norm(model.parameters(), float("inf"), stages=group.WORLD)
    assert total == torch.linalg.vector_norm(torch.stack([norm for own in norms for norm in own]))
    every = [None] * world
    all_gather_object(every, (results, gradients))
    return (every[-1][0][0], *(g for _, own in every for g in own))
