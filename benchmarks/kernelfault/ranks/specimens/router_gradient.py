"""Experts over ranks by batched products: a slot of another rank computes some own expert, with the score 0."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget


@assay.case(T=[7], D=[6], E=[4], K=[2])
def tokens(make, T, D, E, K):
    ids = torch.stack([make.permutation(E)[:K] for _ in range(T)])
    return {
        "x": make.normal(T, D), "scores": make.uniform(T, K), "ids": ids,
        "experts": make.normal(E, D, D, std=D**-0.5), "dy": make.normal(T, D),
    }  # fmt: skip


def golden(x, scores, ids, experts, dy):
    scores = scores.detach().requires_grad_()
    with torch.enable_grad():
        y = torch.einsum("tkod,td,tk->to", experts[ids], x, scores)
        (dscores,) = torch.autograd.grad(y, scores, dy)
    return {"y": y.detach(), "dscores": dscores}


class LocalScores(torch.autograd.Function):
    """Forward: scores of other ranks' experts become 0. Backward: the sum over ranks, because each knows its own."""

    @staticmethod
    def forward(ctx, scores, own):
        return scores.masked_fill(~own, 0.0)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad, None


def batched_mm(x, weights, local, own, experts):
    selected = experts[local.clamp(max=len(experts) - 1)]  # [tokens, slots, out, in]
    out = torch.matmul(selected, x[:, None, :, None]).squeeze(-1)
    weights = weights.masked_fill(~own, 0.0)
    return (out * weights[..., None]).sum(1)


def step(x, scores, ids, experts, dy):
    scores = scores.clone().requires_grad_()
    local = ids - dist.get_rank() * len(experts)
    own = (local >= 0) & (local < len(experts))
    local = torch.where(own, local, len(experts))  # the sentinel
    y = batched_mm(x, LocalScores.apply(scores, own), local, own, experts)
    y.backward(dy)
    y = y.detach()
    dist.all_reduce(y)
    return {"y": y, "dscores": scores.grad}


def target():
    return RankTarget(
        step, golden, cases=tokens, backward=None,
        placements={"experts": Shard(0), "y": Replicate(), "dscores": Replicate()},
    )  # fmt: skip
