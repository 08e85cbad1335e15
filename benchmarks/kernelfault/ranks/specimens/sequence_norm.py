"""RMSNorm under sequence parallelism: every rank normalises its tokens, and the weight is the same on all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget


@assay.case(T=[10], D=[7])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "gain": make.normal(D), "dy": make.normal(T, D)}


def golden(x, gain, dy):
    gain = gain.detach().requires_grad_()
    with torch.enable_grad():
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain
        (dgain,) = torch.autograd.grad(y, gain, dy)
    return {"y": y.detach(), "dgain": dgain}


class RMSNorm(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.weight.sequence_parallel = True

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, eps=1e-6)


def finalize_gradients(model):
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad)


def step(x, gain, dy):
    model = RMSNorm(gain)
    y = model(x)
    y.backward(dy)
    finalize_gradients(model)
    return {"y": y.detach(), "dgain": model.weight.grad}


def target():
    return RankTarget(
        step, golden, cases=tokens, backward=None,
        placements={"x": Shard(0), "dy": Shard(0), "y": Shard(0), "dgain": Replicate()},
    )  # fmt: skip
