"""A tensor-parallel MLP on transposed hidden states, [dim, tokens] inside, as fused heads want them."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget


@assay.case(T=[6], D=[5], H=[8])
def tokens(make, T, D, H):
    return {"x": make.normal(T, D), "up": make.normal(H, D, std=D**-0.5), "down": make.normal(D, H, std=H**-0.5)}


def golden(x, up, down):
    return torch.relu(x @ up.T) @ down.T


class CopyToRegion(torch.autograd.Function):
    """Forward: identity. Backward: the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class ReduceFromRegion(torch.autograd.Function):
    """Forward: the sum of the ranks' tensors. Backward: identity."""

    @staticmethod
    def forward(ctx, y):
        y = y.contiguous()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad


def mlp(x, up, down):
    columns = CopyToRegion.apply(x.transpose(0, 1))
    hidden = torch.relu(up @ columns)
    return ReduceFromRegion.apply((down @ hidden).transpose(0, 1))


def target():
    return RankTarget(
        mlp, golden, cases=tokens, outputs=("y",),
        placements={"x": Replicate(), "up": Shard(0), "down": Shard(1), "y": Replicate()},
    )  # fmt: skip
