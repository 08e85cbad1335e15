"""Expert parallelism with all-to-all: the gradient of an expert sums over the tokens of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget


@assay.case(T=[12], D=[5], E=[4])
def batch(make, T, D, E):
    return {
        "x": make.normal(T, D), "ids": make.integers(0, E, T), "target": make.normal(T, D),
        "dense": make.normal(D, D, std=D**-0.5), "experts": make.normal(E, D, D, std=D**-0.5),
    }  # fmt: skip


def golden(x, ids, target, dense, experts):
    dense, experts = (t.detach().requires_grad_() for t in (dense, experts))
    with torch.enable_grad():
        y = torch.einsum("tod,td->to", experts[ids], x @ dense.T)
        loss = (y - target).square().mean()
        ddense, dexperts = torch.autograd.grad(loss, (dense, experts))
    return {"ddense": ddense, "dexperts": dexperts}


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.sent, ctx.received = sent, received
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.received, ctx.sent), None, None


def dispatched(h, ids, experts):
    world, own = dist.get_world_size(), len(experts)
    order = ids.argsort(stable=True)
    sent = torch.bincount(ids // own, minlength=world)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    sent, received = sent.tolist(), received.tolist()
    rows = AllToAll.apply(h[order], sent, received)
    local = AllToAll.apply(ids[order], sent, received) - dist.get_rank() * own
    out = torch.einsum("tod,td->to", experts[local], rows)
    return torch.empty_like(h).index_copy(0, order, AllToAll.apply(out, received, sent))


def reduce_gradients(dense, experts, dp_size, ep_size):
    dist.all_reduce(dense.grad)
    dense.grad /= dp_size
    experts.grad /= ep_size  # the all-to-all has summed the gradients of all ranks' tokens


def step(x, ids, target, dense, experts):
    dense, experts = nn.Parameter(dense.clone()), nn.Parameter(experts.clone())
    y = dispatched(x @ dense.T, ids, experts)
    loss = (y - target).square().mean()
    loss.backward()
    reduce_gradients(dense, experts, dist.get_world_size(), dist.get_world_size())
    return {"ddense": dense.grad, "dexperts": experts.grad}


def target():
    shards = dict.fromkeys(("x", "ids", "target", "experts", "dexperts"), Shard(0))
    return RankTarget(step, golden, cases=batch, backward=None, placements={**shards, "ddense": Replicate()})
