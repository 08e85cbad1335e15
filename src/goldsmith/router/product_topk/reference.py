"""router.product_topk in plain torch. S[i, j] = x[i] + y[j]; g is the gradient of the scores.

The selection is decided in the dtype `sums`: float32 for inputs up to float32, even if a golden gets them as float64
copies. Everything after the selection is computed in the dtype of the inputs, or float32 for 16 bits.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ...core.tracing import deciding, stage
from .._common import add_at, chunk_bytes, flat, sum_dtype

NEG_INF = -math.inf


def forward(
    x: Tensor, y: Tensor, *, k: int, log_softmax: bool, weights: str, sums: str
) -> tuple[Tensor, Tensor, Tensor]:
    to, batch, sy = sum_dtype(x.dtype), x.shape[:-1], y.shape[-1]
    x, y = flat(x), flat(y)
    with deciding(sums):
        indices = stage("indices", select(x.detach(), y.detach(), k, getattr(torch, sums)).view(*batch, k)).view(-1, k)
    x, y = x.to(to), y.to(to)
    masked, ix, iy = split(indices, sy)
    s = x.gather(-1, ix) + y.gather(-1, iy)
    s = stage("sums", s.masked_fill(masked, NEG_INF).view(*batch, k)).view(-1, k)
    lse = x.new_empty(0)
    if log_softmax and weights != "softmax":
        lse = torch.stack((_logsumexp(x), _logsumexp(y)), -1)
        s = s - (lse[:, :1] + lse[:, 1:])
        lse = lse.view(*batch, 2)
    scores = stage("scores", _weighed(s, masked, weights).view(*batch, k))
    return scores, indices.view(*batch, k), lse


def select(x: Tensor, y: Tensor, k: int, sums: torch.dtype) -> Tensor:
    """indices [rows, k] in int32, with -1 where a pair contains -inf.

    A pair of ranks (a, b), counted from 0, can be selected only if (a + 1)(b + 1) <= k: rounding is monotone, so all
    pairs (a', b') with a' <= a and b' <= b come before it. A stable sort of these candidates in lexical order gives the
    total order.
    """
    a, b = candidates(k, x.shape[-1], y.shape[-1], x.device)
    # four tensors of candidates are alive at a time: two gathered ones, their sums, their order
    rows = max(1, chunk_bytes(x.device) // (4 * 8 * max(1, a.numel(), x.shape[-1], y.shape[-1])))
    parts = [_select(x[at : at + rows], y[at : at + rows], a, b, k, sums) for at in range(0, max(1, len(x)), rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _select(x: Tensor, y: Tensor, a: Tensor, b: Tensor, k: int, sums: torch.dtype) -> Tensor:
    to = sum_dtype(x.dtype)
    x, y = x.to(sums), y.to(sums)
    rank_x, rank_y = stage("rank_x", ranks(x, k)), stage("rank_y", ranks(y, k))
    best_x, best_y = x.gather(-1, rank_x).index_select(-1, a), y.gather(-1, rank_y).index_select(-1, b)
    pairs = (best_x + best_y).masked_fill((best_x == NEG_INF) | (best_y == NEG_INF), NEG_INF)
    pairs = stage("candidates", pairs.to(to))
    best = canonical(pairs).argsort(dim=-1, descending=True, stable=True)[:, :k]
    indices = rank_x.gather(-1, a[best]) * y.shape[-1] + rank_y.gather(-1, b[best])
    return indices.masked_fill(pairs.gather(-1, best) == NEG_INF, -1).to(torch.int32)


def ranks(t: Tensor, k: int) -> Tensor:
    """Indices of the k largest by a stable descending sort: lower index first among equals, NaN before all numbers."""
    return canonical(t).argsort(dim=-1, descending=True, stable=True)[:, :k]


def canonical(t: Tensor) -> Tensor:
    """t with a single zero and a single NaN, because radix sorts order by bits."""
    return torch.where(t.isnan(), math.nan, t + 0.0)


def candidates(k: int, sx: int, sy: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ranks (a, b) with (a + 1)(b + 1) <= k, in lexical order."""
    wrapped = torch._C._functorch.peek_interpreter_stack() is not None  # a transform's tensors must not be cached
    return (_candidates if wrapped else _kept)(k, sx, sy, device)


def _candidates(k: int, sx: int, sy: int, device: torch.device) -> tuple[Tensor, Tensor]:
    cpu = torch.device("cpu")  # independent of the default device
    widths = torch.tensor([min(sy, k // (a + 1)) for a in range(min(sx, k))], device=cpu)
    a = torch.arange(len(widths), device=cpu).repeat_interleave(widths)
    b = torch.arange(len(a), device=cpu) - (widths.cumsum(0) - widths)[a]
    return a.to(device), b.to(device)


_kept = functools.lru_cache(maxsize=64)(_candidates)


def split(indices: Tensor, sy: int) -> tuple[Tensor, Tensor, Tensor]:
    """(masked, ix, iy) of flat indices; -1 is tested before the division, and masked entries get position 0."""
    masked = indices < 0
    place = indices.masked_fill(masked, 0).long()
    return masked, place // sy, place % sy


def _logsumexp(t: Tensor) -> Tensor:
    """logsumexp over the last axis; -inf without a gradient for a row of only -inf, where torch's gradient is NaN."""
    lost = (t == NEG_INF).all(-1)
    return t.masked_fill(lost.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(lost, NEG_INF)


def _row_sums(t: Tensor) -> Tensor:
    """Row sums [rows, 1]; a single row is duplicated, because torch sums a long one on several threads."""
    if len(t) == 1:
        return t.expand(2, -1).sum(-1, keepdim=True)[:1]
    return t.sum(-1, keepdim=True)


def _weighed(s: Tensor, masked: Tensor, weights: str) -> Tensor:
    """Scores from sums s; exp never sees a masked entry, since the derivative 0 * exp(inf) would be NaN."""
    if weights == "none":
        return s.masked_fill(masked, NEG_INF)
    if weights == "softmax":
        s = s - s[:, :1].detach()  # the first sum is the largest, or NaN
    e = s.masked_fill(masked, 0.0).exp().masked_fill(masked, 0.0)
    if weights == "softmax":
        # masked again, because 0 / NaN is NaN
        e = (e / _row_sums(e).masked_fill(masked[:, :1], 1.0)).masked_fill(masked, 0.0)
    return e


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    x, y, scores = (flat(tensors[name]) for name in ("x", "y", "scores"))
    batch, k, to = tensors["x"].shape[:-1], options["k"], sum_dtype(x.dtype)
    masked, ix, iy = split(flat(tensors["indices"]), y.shape[-1])
    g = flat(grads["scores"]).to(to).masked_fill(masked, 0.0)  # even for weight 0, because NaN * 0 is NaN
    ds = g
    if options["weights"] == "softmax":
        ds = scores * (g - _row_sums(g * scores))
    elif options["weights"] == "exp":
        ds = g * scores
    ds = stage("dsums", ds.masked_fill(masked, 0.0).view(*batch, k)).view(-1, k)
    total = _row_sums(ds)
    gradients = {}
    for axis, (name, logits, at) in enumerate((("x", x, ix), ("y", y, iy))):
        if name not in needs:
            continue
        d = add_at(ds, at, logits.shape[-1])
        if options["log_softmax"] and options["weights"] != "softmax":
            d = d - _softmax(logits.to(to), flat(tensors["lse"])[:, axis : axis + 1]) * total
        gradients[name] = stage(f"dscores_{name}", d.to(logits.dtype).view(tensors[name].shape))
    return gradients


def _softmax(logits: Tensor, lse: Tensor) -> Tensor:
    """exp(logits - lse); 0 for a row of only -inf."""
    return (logits - lse.masked_fill(lse == NEG_INF, 0.0)).exp()
