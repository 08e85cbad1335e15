"""Triton kernels of a recorded step beside products and experts: norms, heads in their places, the router's choice.

Each result is rounded to the model's dtype where the model's own modules round it; sums are float32. B sequences,
H hidden, D numbers of a head, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.arithmetic import exp
from ...experts._kernels.launch import Launch

_FREE = ["x_ptr", "more_ptr", "weight_ptr", "sum_ptr", "y_ptr"]


@triton.jit(do_not_specialize_on_alignment=_FREE)
def _norm_kernel(x_ptr, more_ptr, weight_ptr, sum_ptr, y_ptr, epsilon, H, MORE: tl.constexpr, BLOCK: tl.constexpr):
    """sum = x + more; y = weight * (sum / sqrt(mean(sum^2) + epsilon))"""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < H
    x = tl.load(x_ptr + row * H + column, inside, 0.0)
    if MORE:
        x = (x.to(tl.float32) + tl.load(more_ptr + row * H + column, inside, 0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * H + column, x, inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / H + epsilon)
    normed = (wide * scale).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, inside, 0.0).to(tl.float32)
    tl.store(y_ptr + row * H + column, (weight * normed).to(x.dtype), inside)


def norm(x: Tensor, weight: Tensor, epsilon: float, more: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x + more, its RMS norm times weight) for contiguous x and more [B, H]; without `more`, x itself."""
    total, y = x if more is None else torch.empty_like(x), torch.empty_like(x)
    launch = _norming(float(epsilon), x.shape[1], more is not None, x.dtype, x.device)
    launch((len(x), 1, 1), x.device, x, x if more is None else more, weight, total, y)
    return total, y


@lru_cache(maxsize=64)
def _norming(epsilon: float, hidden: int, more: bool, dtype: torch.dtype, device: torch.device) -> Launch:
    return Launch(_norm_kernel, (epsilon, hidden, more, triton.next_power_of_2(hidden)), 8)


@triton.jit
def _rotated(x_ptr, weight_ptr, cosines_ptr, sines_ptr, epsilon, D, d, NORM: tl.constexpr):
    """[BLOCK]: a head, normed if NORM, then rotated: x cos + rotate_half(x) sin"""
    inside, half = d < D, D // 2
    other = tl.where(d < half, d + half, d - half)
    x, y = tl.load(x_ptr + d, inside, 0.0), tl.load(x_ptr + other, inside, 0.0)
    kind = x.dtype
    a, b = x.to(tl.float32), y.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a, 0) / D + epsilon)
        a, b = (a * scale).to(kind).to(tl.float32), (b * scale).to(kind).to(tl.float32)
        a = (tl.load(weight_ptr + d, inside, 0.0).to(tl.float32) * a).to(kind).to(tl.float32)
        b = (tl.load(weight_ptr + other, inside, 0.0).to(tl.float32) * b).to(kind).to(tl.float32)
    b = tl.where(d < half, -b, b)
    a = (a * tl.load(cosines_ptr + d, inside, 0.0).to(tl.float32)).to(kind).to(tl.float32)
    b = (b * tl.load(sines_ptr + d, inside, 0.0).to(tl.float32)).to(kind).to(tl.float32)
    return (a + b).to(kind)


_POINTERS = [
    "q_ptr", "k_ptr", "v_ptr", "q_norm_ptr", "k_norm_ptr", "cosines_ptr", "sines_ptr", "positions_ptr", "last_ptr",
    "keys_ptr", "values_ptr", "out_ptr",
]  # fmt: skip


@triton.jit(do_not_specialize=["CAPACITY"], do_not_specialize_on_alignment=_POINTERS)
def _place_kernel(q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, cosines_ptr, sines_ptr, positions_ptr, last_ptr,
                  keys_ptr, values_ptr, out_ptr, CAPACITY, epsilon, Q, KV, D, NORM: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """The program ids are (sequence, head): Q heads of queries, then KV of keys, then KV of values."""
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    position = tl.load(positions_ptr + row)
    cosines_ptr += position * D
    sines_ptr += position * D
    if head < Q:
        x = _rotated(q_ptr + (row * Q + head) * D, q_norm_ptr, cosines_ptr, sines_ptr, epsilon, D, d, NORM)
        tl.store(out_ptr + (row * Q + head) * D + d, x, d < D)
    else:
        last = tl.load(last_ptr)
        if head < Q + KV:
            at = row * KV + head - Q
            x = _rotated(k_ptr + at * D, k_norm_ptr, cosines_ptr, sines_ptr, epsilon, D, d, NORM)
            tl.store(keys_ptr + (at * CAPACITY + last) * D + d, x, d < D)
        else:
            at = row * KV + head - Q - KV
            tl.store(values_ptr + (at * CAPACITY + last) * D + d, tl.load(v_ptr + at * D + d, d < D, 0.0), d < D)


def place_heads(
    heads: Sequence[Tensor], norms: tuple[Tensor, Tensor] | None, angles: tuple[Tensor, Tensor], positions: Tensor,
    last: Tensor, keys: Tensor, values: Tensor, epsilon: float,
) -> Tensor:  # fmt: skip
    """The rotated queries [B, Q, D]; writes the rotated keys, and the values, at position `last` of the cache

    heads      queries [B, Q D], keys and values [B, KV D], contiguous
    norms      weights [D] of the norms of queries and keys
    angles     cosines and sines [most positions, D]; positions int64 [B]
    keys, values   the cache [B, KV, capacity, D]
    """
    query = heads[0]
    B, KV, capacity, D = keys.shape
    Q = query.shape[1] // D
    weights = norms or (query, query)
    out = torch.empty(B, Q, D, dtype=query.dtype, device=query.device)
    launch = _placing(float(epsilon), Q, KV, D, norms is not None, query.dtype, query.device)
    launch((B, Q + 2 * KV, 1), query.device, *heads, *weights, *angles, positions, last, keys, values, out, capacity)
    return out


@lru_cache(maxsize=64)
def _placing(
    epsilon: float, heads: int, kv_heads: int, width: int, normed: bool, dtype: torch.dtype, device: torch.device
) -> Launch:
    return Launch(_place_kernel, (epsilon, heads, kv_heads, width, normed, triton.next_power_of_2(width)), 1)


@triton.jit(do_not_specialize_on_alignment=["scores_ptr", "ids_ptr", "weights_ptr"])
def _choose_kernel(scores_ptr, ids_ptr, weights_ptr, E, K: tl.constexpr, NORMALISED: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """The K largest of softmax(scores), the lowest expert first where two are equal; NaN counts as the largest"""
    row, e = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scores = tl.load(scores_ptr + row * E + e, e < E, float("-inf")).to(tl.float32)
    p = exp(scores - tl.max(scores, 0))
    p = p / tl.sum(p, 0)
    left = tl.where(e < E, tl.where(p == p, p, 2.0), -1.0)
    total, values = 0.0, ()
    for j in tl.static_range(K):
        best = tl.min(tl.where(left == tl.max(left, 0), e, BLOCK), 0)
        value = tl.sum(tl.where(e == best, p, 0.0), 0)
        tl.store(ids_ptr + row * K + j, best.to(tl.int64))
        values = values + (value,)
        total += value
        left = tl.where(e == best, -2.0, left)
    for j in tl.static_range(K):
        value = values[j]
        if NORMALISED:
            value = value / total
        tl.store(weights_ptr + row * K + j, value.to(weights_ptr.dtype.element_ty))


def choose(scores: Tensor, k: int, *, normalised: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(ids int64 [B, k], weights [B, k] in dtype): the experts with the largest softmax(scores [B, E]), in falling
    order

    normalised   their weights are divided by their sum
    """
    B, E = scores.shape
    ids = torch.empty(B, k, dtype=torch.int64, device=scores.device)
    weights = torch.empty(B, k, dtype=dtype, device=scores.device)
    _choosing(E, k, normalised, scores.dtype, dtype, scores.device)((B, 1, 1), scores.device, scores, ids, weights)
    return ids, weights


@lru_cache(maxsize=64)
def _choosing(
    experts: int, k: int, normalised: bool, dtype: torch.dtype, of_weights: torch.dtype, device: torch.device
) -> Launch:
    return Launch(_choose_kernel, (experts, k, normalised, triton.next_power_of_2(experts)), 1)
