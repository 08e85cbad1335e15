"""Two wrong routers from public code: ties without a defined order, and a stale accumulator."""

import torch

from goldsmith import assay

BUFFERS = {}


@assay.case(T=64, s=64, k=16, tags=("every_probe",), why="bfloat16 logits lie on a grid: sums tie in most rows")
def logits(make, T, s, k):
    return {"x": make.normal(T, s), "y": make.normal(T, s), "k": k}


def golden(x, y, k):
    """Any choice among sums that rounding cannot distinguish is legal; assay.topk declares that."""
    sums = assay.stage("sums", (x[:, :, None] + y[:, None, :]).flatten(1))
    with assay.deciding("float64"):  # the golden chooses one of the equals and continues with it
        index = sums.argsort(dim=-1, descending=True, stable=True)[:, :k]
    index = assay.stage("index", index)
    return sums.gather(1, index), index


def bfloat16_sums(x, y, k):
    """Sums in the logits' dtype, with ties as torch.topk breaks them."""
    sums = assay.stage("sums", (x[:, :, None] + y[:, None, :]).flatten(1))
    scores, index = sums.topk(k, -1)
    return scores, index


def scattered(x, y, k, index, grad_scores):
    s = y.shape[1]
    g = grad_scores.float()
    dx = torch.zeros(x.shape).scatter_add_(1, index // s, g)
    dy = torch.zeros(y.shape).scatter_add_(1, index % s, g)
    return {"x": dx.to(x.dtype), "y": dy.to(y.dtype)}


def stale_accumulators(x, y, k, index, grad_scores):
    """Cached accumulators that are zero only in the first call of a shape."""
    s = y.shape[1]
    g = grad_scores.float()
    for name, logits, at in (("x", x, index // s), ("y", y, index % s)):
        key = (name, *logits.shape)
        if key not in BUFFERS:
            BUFFERS[key] = torch.zeros(logits.shape)
        BUFFERS[key].scatter_add_(1, at, g)
    return {name: BUFFERS[name, *t.shape].to(t.dtype, copy=True) for name, t in (("x", x), ("y", y))}


def target(forward, backward, dtype):
    return assay.Target(
        forward, golden, cases=logits, outputs=("scores", "index"), backward=backward, dtypes=(dtype,),
        decisions={"index": assay.topk(scores="sums", k="k")}, reset=BUFFERS.clear,
    )  # fmt: skip


TIES = target(bfloat16_sums, scattered, torch.bfloat16)


def float32_sums(x, y, k):
    return bfloat16_sums(x.float(), y.float(), k)


STALE = target(float32_sums, stale_accumulators, torch.float32)
