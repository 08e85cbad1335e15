"""Functions that ranks run in tests: a sum over ranks with typical mistakes, a layer, and ranks that hang or end."""

import functools
import os
import signal
import time

import torch
from torch.distributed import (
    ReduceOp,
    all_gather,
    all_reduce,
    barrier,
    destroy_process_group,
    get_rank,
    get_world_size,
)
from torch.distributed.tensor import Replicate, Shard

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget


@assay.case(T=[6], D=[3])
def rows(make, T, D):
    return {"x": make.normal(T, D)}


def golden(x):
    return {"total": x.square().sum(0)}


def right(x):
    total = x.square().sum(0)
    all_reduce(total)
    return {"total": total}


def own_share(x):
    return {"total": x.square().sum(0)}


def mean(x):
    return {"total": right(x)["total"] / get_world_size()}


def twice(x):
    total = right(x)["total"]
    all_reduce(total)
    return {"total": total}


def first_shard(x):
    parts = [torch.empty_like(x) for _ in range(get_world_size())]
    all_gather(parts, x)
    return right(parts[0])


def drift(x):
    total = right(x)["total"]
    return {"total": total + 0.01 * get_rank() * torch.arange(1.0, 1 + len(total))}


def one_rank(x):
    total = right(x)["total"]
    return {"total": total if get_rank() == 0 else None}


def other_name(x):
    return {"sum": right(x)["total"]}


def writes(x):
    answer = right(x)
    if get_rank() == 1:
        x.zero_()
    return answer


def destroys(x):
    answer = right(x)
    destroy_process_group()
    return answer


def hangs_on_rank_1(x):
    if get_rank() == 1:
        sleeping()
    return right(x)


def ends_on_rank_1(x):
    if get_rank() == 1:
        os._exit(0)
    return right(x)


def target(mistake, placements=None):
    placements = {"x": Shard(0)} if placements is None else placements
    return RankTarget(
        globals()[mistake], golden, cases=rows, outputs=("total",), placements=placements, backward=None, name=mistake
    )


def over_tp_only(x, mesh):
    total = x.square().sum(0)
    all_reduce(total, group=mesh.get_group("tp"))
    return {"total": total}


@assay.case(T=[8], D=[3])
def many_rows(make, T, D):
    return {"x": make.normal(T, D)}


def two_dimensional(mesh):
    placements = {"x": (Shard(0), Shard(0))}
    return RankTarget(over_tp_only, golden, cases=many_rows, placements=placements, mesh=mesh, backward=None)


@assay.case(T=[6], D=[4])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "weight": make.normal(D, D)}


class _Copied(torch.autograd.Function):
    """Forward: identity. Backward: the sum over ranks."""

    @staticmethod
    def forward(ctx, weight):
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        all_reduce(grad, ReduceOp.SUM)
        return grad


def linear(x, weight):
    return x @ weight.T


def reduced_linear(x, weight):
    return x @ _Copied.apply(weight).T


def layer(kind):
    function = reduced_linear if kind == "right" else linear
    placements = {"x": Shard(0), "y": Shard(0), "weight": Replicate()}
    return RankTarget(function, linear, cases=tokens, outputs=("y",), placements=placements)


def sleeping():
    time.sleep(60)


def failing(mistake):
    """Rank 1 fails, while rank 0 waits for it."""
    if get_rank() == 1:
        if mistake == "hangs":
            sleeping()
        if mistake == "returns":
            return
        if mistake == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if mistake == "other_call":
            barrier()
    all_reduce(torch.ones(1))


def interprets_quickly():
    """Whether Triton's interpreter skips work here that changes no result."""
    from triton.runtime import interpreter

    return isinstance(interpreter._patch_lang, functools.partial)
