"""router.atomic_experts in plain torch. Three strategies read the tables in different orders; see the family's README.

T tokens with K experts each make P = T K pairs. No tensor of size P x D is built: tables are read in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...core.tracing import stage
from .._common import add_at, chunk_bytes, flat, sum_dtype
from .._pairs import Pairs
from .row_sparse import row_sparse


def forward(
    h: Tensor,
    w_in: Tensor | None,
    w_out: Tensor,
    weights: Tensor,
    indices: Tensor,
    *,
    activation: str,
    strategy: str,
    sparse_grad: bool,
) -> tuple[Tensor, Tensor]:
    to = sum_dtype(h.dtype)
    pairs = Pairs(indices, w_out.shape[0])
    pairs.raise_if_out_of_range()
    rows = flat(h).to(to)
    preact = rows.new_empty(0)
    hidden = torch.ones(pairs.shape, dtype=to, device=h.device)
    if w_in is not None:
        preact = stage("preact", DOTS[strategy](rows, w_in, pairs))
        hidden = stage("hidden", ACTIVATE[activation](preact))
    gated = stage("gated", pairs.kept(flat(weights).to(to)) * pairs.kept(hidden))
    y = SUMS[strategy](gated, w_out, pairs).masked_fill(pairs.lost, math.nan)
    y = stage("y", y.to(h.dtype).view(*h.shape[:-1], w_out.shape[1]))
    return y, preact if w_in is None else preact.view(indices.shape)


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    h, w_in, w_out = (tensors[name] for name in ("h", "w_in", "w_out"))
    to, strategy = sum_dtype(h.dtype), options["strategy"]
    pairs = Pairs(tensors["indices"], w_out.shape[0])
    weights = pairs.kept(flat(tensors["weights"]).to(to))
    dy = flat(grads["y"]).to(to)
    gradients = {}
    if w_in is None:
        hidden, slope = torch.ones_like(weights), None
    else:
        preact = pairs.kept(flat(tensors["preact"]))
        hidden, slope = pairs.kept(ACTIVATE[options["activation"]](preact)), SLOPE[options["activation"]](preact)
    table = _sparse_table if options["sparse_grad"] else _dense_table
    if needs - {"w_out"}:
        r = stage("dout_dot", DOTS[strategy](dy, w_out, pairs))
        gradients["weights"] = stage(
            "dweights", (hidden * r).to(tensors["weights"].dtype).view(tensors["weights"].shape)
        )
    if slope is None:
        gradients["h"] = torch.zeros_like(h, memory_format=torch.contiguous_format)
    elif needs & {"h", "w_in"}:
        da = pairs.kept(weights * r * slope)
        if options["activation"] in ("relu", "relu2"):
            da = da.masked_fill(preact <= 0, 0.0)  # a gate, not a factor: 0 also for an incoming NaN
        da = stage("dpreact", da)
        dh = SUMS[strategy](da, w_in, pairs).masked_fill(pairs.lost, math.nan)
        gradients["h"] = stage("dh", dh.to(h.dtype).view(h.shape))
        if "w_in" in needs:
            gradients["w_in"] = stage("dw_in", table(da, flat(h).to(to), w_in, pairs))
    if "w_out" in needs:
        gradients["w_out"] = stage("dw_out", table(weights * hidden, dy, w_out, pairs))
    return gradients


# dots: sum_d rows[t, d] table[e_tj, d] -> [T, K];  sums: sum_j values[t, j] table[e_tj, :] -> [T, width]


def _gathered_dots(rows: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
    chunks = [
        _products(pairs.rows(table, part, rows.dtype), rows[part].unsqueeze(-1)).squeeze(-1)
        for part in pairs.chunks(table.shape[1])
    ]
    return pairs.kept(torch.cat(chunks))  # zeroed table rows are not enough, because 0 * NaN is NaN


def _gathered_sums(values: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
    chunks = [
        _products(values[part].unsqueeze(1), pairs.rows(table, part, values.dtype)).squeeze(1)
        for part in pairs.chunks(table.shape[1])
    ]
    return torch.cat(chunks)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """left @ right per token; a single one is duplicated, because torch multiplies a batch of one in another order."""
    if len(left) == 1:
        return (left.expand(2, -1, -1) @ right.expand(2, -1, -1))[:1]
    return left @ right


def _sorted_dots(rows: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
    """Dots of the pairs sorted by expert, so that a table row is read once for all its tokens."""
    place, expert, token = pairs.by_expert
    chunks = [
        (table.index_select(0, expert[part].clamp(max=pairs.n - 1)).to(rows.dtype) * rows[token[part]]).sum(-1)
        for part in pairs.parts(table.shape[1], 0, len(place))
    ]
    dots = torch.cat([rows.new_empty(0), *chunks]).index_select(0, place.argsort())
    return pairs.kept(dots.view(pairs.shape))


def _dense_dots(rows: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
    dots = rows.new_zeros(pairs.shape)
    for first in range(0, pairs.n, _experts(table)):
        block = table[first : first + _experts(table)].to(rows.dtype)
        local = pairs.at - first
        inside = (local >= 0) & (local < len(block)) & ~pairs.skipped
        picked = [
            tile.mm(block.T).gather(-1, at)
            for tile, at in zip(_tiles(rows), _tiles(local.clamp(0, len(block) - 1)), strict=True)
        ]
        dots = torch.where(inside, torch.cat(picked)[: len(dots)], dots)
    return dots


def _dense_sums(values: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
    y = values.new_zeros(pairs.shape[0], table.shape[1])
    for first in range(0, pairs.n, _experts(table)):
        block = table[first : first + _experts(table)].to(values.dtype)
        local = pairs.at - first
        inside = (local >= 0) & (local < len(block))
        share, at = values.masked_fill(~inside, 0.0), local.clamp(0, len(block) - 1)
        tiles = zip(_tiles(share), _tiles(at), strict=True)
        y = y + torch.cat([add_at(v, i, len(block)).mm(block) for v, i in tiles])[: len(y)]
    return y


DOTS: dict[str, Callable[[Tensor, Tensor, Pairs], Tensor]] = {
    "gather": _gathered_dots,
    "sorted": _sorted_dots,
    "dense": _dense_dots,
}
SUMS: dict[str, Callable[[Tensor, Tensor, Pairs], Tensor]] = {
    "gather": _gathered_sums,
    "sorted": _gathered_sums,  # a token's sum does not depend on the order of the other pairs
    "dense": _dense_sums,
}


def _experts(table: Tensor) -> int:
    """Experts per dense chunk, from the table's width alone: another number would change the order of the sums."""
    return max(1, chunk_bytes(table.device) // (16 * max(_tokens(table), table.shape[1])))


def _tokens(t: Tensor) -> int:
    """Tokens per matrix product, a constant: a token's result must not depend on the number of tokens."""
    return 64 if t.device.type == "cpu" else 1024


def _tiles(t: Tensor) -> tuple[Tensor, ...]:
    """t [rows, size] split into tiles of _tokens(t) rows, the last one padded with zeros."""
    size = _tokens(t)
    missing = -len(t) % size if len(t) else size
    return torch.cat([t, t.new_zeros(missing, t.shape[1])]).split(size)


# the gradient of a table: sum over the pairs with e_tj = e of values[t, j] rows[t, :], with (t, j) ascending


def _dense_table(values: Tensor, rows: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
    _, expert, _ = pairs.by_expert
    width = table.shape[1]
    # on a GPU in one step, with an extra row for skipped pairs: finding the chunks' bounds would have to wait for it
    step = pairs.n if rows.device.type != "cpu" else max(1, chunk_bytes(rows.device) // (16 * width))
    out = torch.empty_like(table, memory_format=torch.contiguous_format)
    starts = list(range(0, pairs.n, step))
    cuts = (
        [0, len(expert)]
        if len(starts) == 1
        else torch.searchsorted(expert, expert.new_tensor([*starts, pairs.n])).tolist()
    )
    for start, first, last in zip(starts, cuts[:-1], cuts[1:], strict=True):
        some = min(step, pairs.n - start)
        total = _added(rows.new_zeros(some + 1, width), expert - start, values, rows, pairs, first, last)
        out[start : start + some] = total[:some].to(table.dtype)
    return out


def _sparse_table(values: Tensor, rows: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
    _, expert, _ = pairs.by_expert
    used, local = expert.unique_consecutive(return_inverse=True)
    count = int((used < pairs.n).sum())
    total = _added(rows.new_zeros(len(used), table.shape[1]), local, values, rows, pairs, 0, len(expert))
    return row_sparse(total[:count].to(table.dtype), used[:count], table)


def _added(out: Tensor, into: Tensor, values: Tensor, rows: Tensor, pairs: Pairs, first: int, last: int) -> Tensor:
    """out[into[p]] += values[p] rows[token of p] for the pairs from first to last, in order."""
    place, _, token = pairs.by_expert
    for part in pairs.parts(out.shape[1], first, last):
        terms = rows.index_select(0, token[part]) * values.view(-1)[place[part]].unsqueeze(-1)
        if out.is_cuda:
            out.index_put_((into[part],), terms, accumulate=True)  # deterministic, because it sorts; index_add_ is not
        else:
            out.index_add_(0, into[part], terms)
    return out


# Activations act(a) and slopes act'(a); for relu and relu2 the slope holds where a > 0. On a CPU torch's exp, tanh and
# erf always give the same bits; its sigmoid, silu and gelu differ in the last bit with a number's position in memory.

_ROOT_HALF, _ROOT_2_BY_PI, _CUBIC = math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715


def _tanh_of(a: Tensor) -> Tensor:
    """tanh(sqrt(2 / pi) (a + 0.044715 a^3)), clamped: beyond 30 it is 1 even in float64, and a^3 could overflow."""
    a = a.clamp(-30.0, 30.0)
    return torch.tanh(_ROOT_2_BY_PI * (a + _CUBIC * a * a * a))


def _silu_slope(a: Tensor) -> Tensor:
    s = 1 / (1 + torch.exp(-a))
    return s * (1 + a * (1 - s))


def _gelu_slope(a: Tensor) -> Tensor:
    density = torch.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(a * _ROOT_HALF)) + a * density


def _gelu_tanh_slope(a: Tensor) -> Tensor:
    t = _tanh_of(a)
    a = a.clamp(-30.0, 30.0)
    return 0.5 * (1 + t) + 0.5 * a * (1 - t * t) * _ROOT_2_BY_PI * (1 + 3 * _CUBIC * a * a)


Function = Callable[[Tensor], Tensor]
ACTIVATE: dict[str, Function] = {
    "silu": lambda a: a / (1 + torch.exp(-a)),
    "gelu": lambda a: 0.5 * a * (1 + torch.erf(a * _ROOT_HALF)),
    "gelu_tanh": lambda a: 0.5 * a * (1 + _tanh_of(a)),
    "relu": torch.relu,
    "relu2": lambda a: torch.relu(a).square(),
    "identity": lambda a: a,
}
SLOPE: dict[str, Function] = {
    "silu": _silu_slope,
    "gelu": _gelu_slope,
    "gelu_tanh": _gelu_tanh_slope,
    "relu": torch.ones_like,
    "relu2": lambda a: 2 * torch.relu(a),
    "identity": torch.ones_like,
}
