"""Experts over ranks with a torch dispatcher: tokens are gathered, and outputs are reduce-scattered."""

import torch
from torch.distributed.tensor import DTensor, Partial, Shard

from goldsmith import assay
from goldsmith.assay.ranks import RankTarget


@assay.case(T=[8], D=[6], E=[4], H=[5], K=[2])
def tokens(make, T, D, E, H, K):
    ids = torch.stack([make.permutation(E)[:K] for _ in range(T)])
    return {
        "x": make.normal(T, D), "scores": make.uniform(T, K), "ids": ids,
        "up": make.normal(E, H, D, std=D**-0.5), "down": make.normal(E, D, H, std=H**-0.5),
    }  # fmt: skip


def golden(x, scores, ids, up, down):
    hidden = torch.relu(torch.einsum("tkhd,td->tkh", up[ids], x))
    return torch.einsum("tkdh,tkh,tk->td", down[ids], hidden, scores)


def experts(x, scores, ids, up, down, mesh):
    def gathered(t):
        whole = DTensor.from_local(t, mesh, [Shard(0)], run_check=False)
        return whole.full_tensor(grad_placements=[Partial()]) if t.is_floating_point() else whole.full_tensor()

    x, scores, ids = gathered(x), gathered(scores), gathered(ids)
    first = mesh.get_local_rank() * len(up)
    y = torch.zeros_like(x)
    for expert in range(len(up)):
        token, slot = torch.where(ids == first + expert)
        out = torch.relu(x[token] @ up[expert].T) @ down[expert].T
        y = y.index_add(0, token, out * scores[token, slot, None])
    return DTensor.from_local(y, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(0)]).to_local()


def target():
    sharded = dict.fromkeys(("x", "scores", "ids", "up", "down", "y"), Shard(0))
    return RankTarget(experts, golden, cases=tokens, outputs=("y",), placements=sharded, mesh={"ep": -1})
