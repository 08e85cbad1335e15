"""Triton kernels of a recorded step: where each route's expert is, and attention of one token over a cache.

B sequences, KV key heads, G queries of each, D numbers of a key, DV of a value. Lengths are read from memory, so that
one recording serves every length.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.device import triton_interpreted
from ...experts._kernels.launch import Launch

PART = 128  # positions of a program; its sums do not depend on the cache's capacity
_BLOCK = 64  # positions that are multiplied together
_JOINED = 16  # parts that are added together


@triton.jit(do_not_specialize_on_alignment=["ids_ptr", "slots_ptr", "tiles_ptr", "place_ptr", "uses_ptr", "wrong_ptr"])
def _locate_kernel(ids_ptr, slots_ptr, tiles_ptr, place_ptr, uses_ptr, wrong_ptr, R, E, BLOCK: tl.constexpr):
    """The tile and the row of each route: row R + r if its expert has a slot, row r if the CPU computes it"""
    r = tl.arange(0, BLOCK)
    inside = r < R
    expert = tl.load(ids_ptr + r, inside, -1)
    there = inside & (expert >= 0) & (expert < E)
    slot = tl.load(slots_ptr + expert, there, -1)
    tl.store(tiles_ptr + r, tl.where(slot >= 0, slot, 0), inside)
    tl.store(tiles_ptr + 2 * R + r, tl.where(slot >= 0, 1, 0), inside)
    tl.store(tiles_ptr + 3 * R + r, tl.where(slot >= 0, expert, 0).to(tl.int32), inside)
    tl.store(place_ptr + r, tl.where(there, tl.where(slot >= 0, R + r, r), -1), inside)
    tl.atomic_add(uses_ptr + expert, 1, there)
    if tl.sum(tl.where(inside & ((expert < -1) | (expert > E)), 1, 0)) > 0:
        tl.store(wrong_ptr, 1)


def locate(ids: Tensor, slots: Tensor, tiles: Tensor, place: Tensor, uses: Tensor, wrong: Tensor) -> None:
    """Fills all rows but 1 of tiles [4, R] and place [R] for the R ids; counts them in uses [E]

    slots   [E] int32: the slot of each expert, -1 if it has none
    wrong   int32 [1] in pinned host memory: set to 1 for an id outside -1..E
    """
    routes, experts = ids.numel(), slots.numel()
    _locating(routes, experts, ids.dtype, ids.device)((1, 1, 1), ids.device, ids, slots, tiles, place, uses, wrong)


@lru_cache(maxsize=64)
def _locating(routes: int, experts: int, dtype: torch.dtype, device: torch.device) -> Launch:
    return Launch(_locate_kernel, (routes, experts, triton.next_power_of_2(routes)), 1)


_FREE = ["q_ptr", "k_ptr", "v_ptr", "last_ptr", "starts_ptr", "sums_ptr", "ends_ptr", "out_ptr"]


@triton.jit(do_not_specialize=["CAPACITY", "PARTS"], do_not_specialize_on_alignment=_FREE)
def _attend_kernel(q_ptr, k_ptr, v_ptr, last_ptr, starts_ptr, sums_ptr, ends_ptr, CAPACITY, PARTS, scaling, KV, G, D,
                   DV, BG: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, LENGTH: tl.constexpr, BN: tl.constexpr,
                   OPERAND: tl.constexpr):  # fmt: skip
    """One part of the positions: sums [B KV G, PARTS, DV] of exp(s - top) v, and ends [.., PARTS, 2]: top, sum of exp

    The program ids are (sequence and key head, part); parts beyond the last position are not written.
    """
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    last, start = tl.load(last_ptr), tl.load(starts_ptr + pair // KV)
    if part * LENGTH <= last:
        g, d, v = tl.arange(0, BG), tl.arange(0, BD), tl.arange(0, BV)
        queries = (g[:, None] < G) & (d[None, :] < D)
        q = tl.load(q_ptr + (pair * G + g[:, None]) * D + d[None, :], queries, 0.0).to(OPERAND)
        top, total = tl.full((BG,), float("-inf"), tl.float32), tl.zeros((BG,), tl.float32)
        sums = tl.zeros((BG, BV), tl.float32)
        for i in tl.static_range(LENGTH // BN):
            at = part * LENGTH + i * BN + tl.arange(0, BN)
            there = (at <= last) & (at >= start)
            place = (pair * CAPACITY + at).to(tl.int64)
            k = tl.load(k_ptr + place[None, :] * D + d[:, None], there[None, :] & (d[:, None] < D), 0.0).to(OPERAND)
            scores = tl.dot(q, k, input_precision="ieee") * scaling
            scores = tl.where(there[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            least = tl.where(higher == float("-inf"), 0.0, higher)  # no position of this part belongs to the sequence
            shrink, p = tl.exp(top - least), tl.exp(scores - least[:, None])
            values = tl.load(v_ptr + place[:, None] * DV + v[None, :], there[:, None] & (v[None, :] < DV), 0.0)
            values, high = values.to(OPERAND), p.to(OPERAND)
            sums = sums * shrink[:, None] + tl.dot(high, values, input_precision="ieee")
            if OPERAND != tl.float32:  # p in two parts of 16 bits: float32 products would take four times as long
                sums += tl.dot((p - high.to(tl.float32)).to(OPERAND), values)
            total, top = total * shrink + tl.sum(p, 1), higher
        row = (pair * G + g) * PARTS + part
        tl.store(sums_ptr + row[:, None] * DV + v[None, :], sums, (g[:, None] < G) & (v[None, :] < DV))
        tl.store(ends_ptr + row * 2, top, g < G)
        tl.store(ends_ptr + row * 2 + 1, total, g < G)


@triton.jit(do_not_specialize=["PARTS"], do_not_specialize_on_alignment=_FREE)
def _join_kernel(sums_ptr, ends_ptr, last_ptr, out_ptr, PARTS, DV, LENGTH: tl.constexpr, BV: tl.constexpr,
                 JOINED: tl.constexpr):  # fmt: skip
    """out [B KV G, DV]: the parts' sums over the sum of exp"""
    row, v = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    parts = tl.load(last_ptr).to(tl.int32) // LENGTH + 1
    top = float("-inf")
    for first in range(0, parts, JOINED):
        at = first + tl.arange(0, JOINED)
        top = tl.maximum(top, tl.max(tl.load(ends_ptr + (row * PARTS + at) * 2, at < parts, float("-inf")), 0))
    total, sums = 0.0, tl.zeros((BV,), tl.float32)
    for first in range(0, parts, JOINED):
        at = first + tl.arange(0, JOINED)
        end = ends_ptr + (row * PARTS + at) * 2
        share = tl.exp(tl.load(end, at < parts, float("-inf")) - top)
        total += tl.sum(share * tl.load(end + 1, at < parts, 0.0), 0)
        spot = sums_ptr + (row * PARTS + at[:, None]) * DV + v[None, :]
        part = tl.load(spot, (at[:, None] < parts) & (v[None, :] < DV), 0.0)
        sums += tl.sum(share[:, None] * part, 0)
    tl.store(out_ptr + row * DV + v, (sums / total).to(out_ptr.dtype.element_ty), v < DV)


def attend(query: Tensor, keys: Tensor, values: Tensor, last: Tensor, starts: Tensor, scaling: float) -> Tensor:
    """[B, Q, DV]: attention of one query for each of Q heads over positions starts[b]..last

    query [B, Q, D], keys [B, KV, capacity, D], values [B, KV, capacity, DV], last int64 [1], starts int64 [B].
    """
    B, Q, D = query.shape
    KV, capacity, DV = keys.shape[1], keys.shape[2], values.shape[3]
    parts = -(-capacity // PART)
    options = {"dtype": torch.float32, "device": query.device}
    sums, ends = torch.empty(B * Q, parts, DV, **options), torch.empty(B * Q, parts, 2, **options)
    out = torch.empty(B, Q, DV, dtype=query.dtype, device=query.device)
    first, second = _attending(float(scaling), KV, Q // KV, D, DV, query.dtype, query.device)
    first((B * KV, parts, 1), query.device, query.contiguous(), keys, values, last, starts, sums, ends, capacity, parts)
    second((B * Q, 1, 1), query.device, sums, ends, last, out, parts)
    return out


@lru_cache(maxsize=64)
def _attending(
    scaling: float, heads: int, group: int, width: int, value_width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Launch, Launch]:
    def block(size: int) -> int:
        return max(16, triton.next_power_of_2(size))

    operand = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtype, tl.float32)
    operand = tl.float32 if triton_interpreted() else operand
    wide = block(value_width)
    sizes = (scaling, heads, group, width, value_width, block(group), block(width), wide, PART, _BLOCK, operand)
    return Launch(_attend_kernel, sizes, 4), Launch(_join_kernel, (value_width, PART, wide, _JOINED), 4)
