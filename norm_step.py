import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget


@assay.case(T=[10, 3], D=[7], why="even and uneven shards")
def tokens(make, T, D):
    return {"x": make.normal(T, D), "gain": make.normal(D), "dy": make.normal(T, D)}


def golden(x, gain, dy):
    """The same in one process."""
    gain = gain.detach().requires_grad_()
    with torch.enable_grad():
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain
        (dgain,) = torch.autograd.grad(y, gain, dy)
    return {"y": y.detach(), "dgain": dgain}


def step(x, gain, dy):
    """Runs on every rank, with the rank's own part of each input."""
    gain = torch.nn.Parameter(gain.clone())
    y = F.rms_norm(x, gain.shape, gain, eps=1e-6)
    y.backward(dy)
    # missing: torch.distributed.all_reduce(gain.grad)
    return {"y": y.detach(), "dgain": gain.grad}


target = RankTarget(
    step,
    golden,
    cases=tokens,
    backward=None,
    placements={"x": Shard(0), "dy": Shard(0), "y": Shard(0), "dgain": Replicate()},
)
