"""Cross entropy over a vocabulary that is sharded over tensor-parallel ranks."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget


@assay.case(T=[6], D=[5], V=[12])
def tokens(make, T, D, V):
    return {"hidden": make.normal(T, D), "labels": make.integers(0, V, T), "weight": make.normal(V, D)}


def golden(hidden, labels, weight):
    logits = hidden @ weight.T
    own = logits.gather(1, labels[:, None]).squeeze(1)
    return {"loss": torch.logsumexp(logits, 1) - own}


def gathered_from_region(logits):
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.contiguous())
    return torch.cat(parts, 1)


def vocab_parallel_cross_entropy(logits, labels):
    size = logits.shape[1]
    first = dist.get_rank() * size
    top = logits.amax(1)
    dist.all_reduce(top, dist.ReduceOp.MAX)
    shifted = logits - top[:, None]
    total = shifted.exp().sum(1)
    dist.all_reduce(total)
    here = (labels >= first) & (labels < first + size)
    own = shifted.gather(1, torch.where(here, labels - first, 0)[:, None]).squeeze(1)
    own = torch.where(here, own, 0.0)
    dist.all_reduce(own)
    return total.log() - own


@torch.no_grad()
def forward(hidden, labels, weight, *, parallel_output=True):
    logits = hidden @ weight.T
    if not parallel_output:
        logits = gathered_from_region(logits)
    return {"loss": vocab_parallel_cross_entropy(logits, labels)}


def target():
    return RankTarget(
        forward, golden, cases=tokens, backward=None, placements={"weight": Shard(0), "loss": Replicate()}
    )  # fmt: skip
