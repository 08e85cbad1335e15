"""Text and images: only some ranks have images in this batch, so the projection of images may have no gradient."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget


@assay.case(T=[8], D=[5])
def batch(make, T, D):
    has_image = torch.zeros(T, dtype=torch.bool)
    has_image[: T // 4] = True  # all on the first rank
    return {
        "text": make.normal(T, D), "image": make.normal(T, D), "has_image": has_image, "target": make.normal(T, D),
        "head": make.normal(D, D, std=D**-0.5), "projection": make.normal(D, D, std=D**-0.5),
    }  # fmt: skip


def golden(text, image, has_image, target, head, projection):
    head, projection = (t.detach().requires_grad_() for t in (head, projection))
    with torch.enable_grad():
        hidden = text + (image @ projection.T) * has_image[:, None]
        loss = (hidden @ head.T - target).square().mean()
        dhead, dprojection = torch.autograd.grad(loss, (head, projection))
    return {"dhead": dhead, "dprojection": dprojection}


def sync_gradients(parameters):
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def step(text, image, has_image, target, head, projection):
    head, projection = nn.Parameter(head.clone()), nn.Parameter(projection.clone())
    hidden = text
    if has_image.any():
        hidden = hidden + (image @ projection.T) * has_image[:, None]
    (hidden @ head.T - target).square().mean().backward()
    sync_gradients([head, projection])
    return {"dhead": head.grad, "dprojection": projection.grad}


def target():
    shards = dict.fromkeys(("text", "image", "has_image", "target"), Shard(0))
    return RankTarget(
        step, golden, cases=batch, backward=None,
        placements={**shards, "dhead": Replicate(), "dprojection": Replicate()},
    )  # fmt: skip
