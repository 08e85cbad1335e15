"""router.product_topk: what it means. S[i, j] = x[i] + y[j]; g is the gradient of the scores.

Which pairs are selected is decided in the dtype `sums`: float32 for inputs up to float32, also where they come as
float64 copies (a golden); everything after that is as wide as the inputs.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ...core.tracing import deciding, stage
from .._common import add_at, chunk_bytes, flat, wide

NEG_INF = -math.inf


def forward(
    x: Tensor, y: Tensor, *, k: int, log_softmax: bool, weights: str, sums: str
) -> tuple[Tensor, Tensor, Tensor]:
    to, batch, sy = wide(x.dtype), x.shape[:-1], y.shape[-1]
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
    """indices [rows, k] in int32, -1 where a pair has -inf in it.

    (a, b) counted in ranks can be selected only if (a + 1)(b + 1) <= k: rounding is monotone, so that no pair with
    both ranks at most as high comes after it. Those candidates in lexical order, sorted stably, are in the total order.
    """
    a, b = candidates(k, x.shape[-1], y.shape[-1], x.device)
    # four tensors of candidates at a time: two gathered, their sums, their places
    rows = max(1, chunk_bytes(x.device) // (4 * 8 * max(1, a.numel(), x.shape[-1], y.shape[-1])))
    parts = [_select(x[at : at + rows], y[at : at + rows], a, b, k, sums) for at in range(0, max(1, len(x)), rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _select(x: Tensor, y: Tensor, a: Tensor, b: Tensor, k: int, sums: torch.dtype) -> Tensor:
    to = wide(x.dtype)
    x, y = x.to(sums), y.to(sums)
    rank_x, rank_y = stage("rank_x", ranks(x, k)), stage("rank_y", ranks(y, k))
    best_x, best_y = x.gather(-1, rank_x).index_select(-1, a), y.gather(-1, rank_y).index_select(-1, b)
    pairs = (best_x + best_y).masked_fill((best_x == NEG_INF) | (best_y == NEG_INF), NEG_INF)
    pairs = stage("candidates", pairs.to(to))
    best = canonical(pairs).argsort(dim=-1, descending=True, stable=True)[:, :k]
    found = rank_x.gather(-1, a[best]) * y.shape[-1] + rank_y.gather(-1, b[best])
    return found.masked_fill(pairs.gather(-1, best) == NEG_INF, -1).to(torch.int32)


def ranks(t: Tensor, k: int) -> Tensor:
    """Places of the first k of a stable descending sort: the lower index first among equals, NaN before everything."""
    return canonical(t).argsort(dim=-1, descending=True, stable=True)[:, :k]


def canonical(t: Tensor) -> Tensor:
    """One zero and one NaN: radix sorts order them by their bits."""
    return torch.where(t.isnan(), math.nan, t + 0.0)


def candidates(k: int, sx: int, sy: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ranks (a, b) with (a + 1)(b + 1) <= k, in lexical order."""
    wrapped = torch._C._functorch.peek_interpreter_stack() is not None  # by a transform, which ends before it is used
    return (_candidates if wrapped else _kept)(k, sx, sy, device)


def _candidates(k: int, sx: int, sy: int, device: torch.device) -> tuple[Tensor, Tensor]:
    cpu = torch.device("cpu")  # whatever torch.device is the default now
    widths = torch.tensor([min(sy, k // (a + 1)) for a in range(min(sx, k))], device=cpu)
    a = torch.arange(len(widths), device=cpu).repeat_interleave(widths)
    b = torch.arange(len(a), device=cpu) - (widths.cumsum(0) - widths)[a]
    return a.to(device), b.to(device)


_kept = functools.lru_cache(maxsize=64)(_candidates)


def split(indices: Tensor, sy: int) -> tuple[Tensor, Tensor, Tensor]:
    """(masked, ix, iy); the test for -1 comes before the division, and masked entries read place 0 for nothing."""
    masked = indices < 0
    place = indices.masked_fill(masked, 0).long()
    return masked, place // sy, place % sy


def _logsumexp(t: Tensor) -> Tensor:
    """-inf on an axis that is wholly -inf, where it has no gradient (torch's own is NaN)."""
    lost = (t == NEG_INF).all(-1)
    return t.masked_fill(lost.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(lost, NEG_INF)


def _row_sums(t: Tensor) -> Tensor:
    """[rows, 1]; a row alone is taken twice, since torch adds a long one up on several threads, in another order."""
    if len(t) == 1:
        return t.expand(2, -1).sum(-1, keepdim=True)[:1]
    return t.sum(-1, keepdim=True)


def _weighed(s: Tensor, masked: Tensor, weights: str) -> Tensor:
    """exp never sees a masked entry: a derivative 0 times exp(inf) would be NaN."""
    if weights == "none":
        return s.masked_fill(masked, NEG_INF)
    if weights == "softmax":
        s = s - s[:, :1].detach()  # the largest, or NaN: scores do not increase
    e = s.masked_fill(masked, 0.0).exp().masked_fill(masked, 0.0)
    if weights == "softmax":
        # masked again: 0 by a sum that is NaN is NaN
        e = (e / _row_sums(e).masked_fill(masked[:, :1], 1.0)).masked_fill(masked, 0.0)
    return e


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    x, y, scores = (flat(tensors[name]) for name in ("x", "y", "scores"))
    batch, k, to = tensors["x"].shape[:-1], options["k"], wide(x.dtype)
    masked, ix, iy = split(flat(tensors["indices"]), y.shape[-1])
    g = flat(grads["scores"]).to(to).masked_fill(masked, 0.0)  # whatever came: NaN times weight 0 would be NaN
    ds = g
    if options["weights"] == "softmax":
        ds = scores * (g - _row_sums(g * scores))
    elif options["weights"] == "exp":
        ds = g * scores
    ds = stage("dsums", ds.masked_fill(masked, 0.0).view(*batch, k)).view(-1, k)
    total = _row_sums(ds)
    found = {}
    for axis, (name, logits, at) in enumerate((("x", x, ix), ("y", y, iy))):
        if name not in needs:
            continue
        d = add_at(ds, at, logits.shape[-1])
        if options["log_softmax"] and options["weights"] != "softmax":
            d = d - _softmax(logits.to(to), flat(tensors["lse"])[:, axis : axis + 1]) * total
        found[name] = stage(f"dscores_{name}", d.to(logits.dtype).view(tensors[name].shape))
    return found


def _softmax(logits: Tensor, lse: Tensor) -> Tensor:
    """exp(logits - lse); 0 on an axis that is wholly -inf."""
    return (logits - lse.masked_fill(lse == NEG_INF, 0.0)).exp()
