"""New keys, rotated by their positions, and values are written to their slots of a paged cache; slot -1 is nobody's.

A cache is [pages, heads, page, D], a slot is page * number + place, and the rotation has its halves side by side
(NeoX). Triton, float32, forward only: a program has one head of one token, caches are copied first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay


@assay.case(T=[5], H=[2], D=[6], pages=[36], page=[4])
def prompt(make, T, H, D, pages, page):
    slots = make.permutation(pages * page)[:T]
    slots[0] = pages * page - 3
    slots[1:][slots[1:] == slots[0]] = -1
    slots[2] = -1
    angle = make.uniform(20, D // 2)
    return {
        "k": make.normal(T, H, D), "v": make.normal(T, H, D), "cos": torch.cos(6 * angle), "sin": torch.sin(6 * angle),
        "positions": make.integers(0, 19, T), "slots": slots, "key_cache": make.normal(pages, H, page, D),
        "value_cache": make.normal(pages, H, page, D),
    }  # fmt: skip


@assay.case(T=[4], H=[3], D=[10], pages=[5], page=[2])
def small(make, T, H, D, pages, page):
    return prompt[0].draw(make, T, H, D, pages, page)


@assay.case(T=[5], H=[1], D=[14], pages=[4], page=[3])
def one_head(make, T, H, D, pages, page):
    return prompt[0].draw(make, T, H, D, pages, page)


def golden(k, v, cos, sin, positions, slots, key_cache, value_cache):
    page = key_cache.shape[2]
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    left, right = k.chunk(2, 2)
    rotated = torch.cat([left * c - right * s, right * c + left * s], 2)
    mine = slots >= 0
    number, place = slots[mine] // page, slots[mine] % page
    keys = key_cache.transpose(1, 2).index_put((number, place), rotated[mine]).transpose(1, 2)
    values = value_cache.transpose(1, 2).index_put((number, place), v[mine]).transpose(1, 2)
    return keys, values


@triton.jit
def _append(k_ptr, v_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr, keys_ptr, values_ptr, H, D, page, HALF,
            BLOCK: tl.constexpr):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        position = tl.load(position_ptr + token)
        d = tl.arange(0, BLOCK)
        inside = d < HALF
        cos = tl.load(cos_ptr + position * HALF + d, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + position * HALF + d, mask=inside, other=0.0)
        source = (token * H + head) * D
        goal = (slot // page * H + head) * page * D + slot % page * D
        left = tl.load(k_ptr + source + d, mask=inside, other=0.0)
        right = tl.load(k_ptr + source + HALF + d, mask=inside, other=0.0)
        tl.store(keys_ptr + goal + d, left * cos - right * sin, mask=inside)
        tl.store(keys_ptr + goal + HALF + d, right * cos + left * sin, mask=inside)
        left = tl.load(v_ptr + source + d, mask=inside, other=0.0)
        right = tl.load(v_ptr + source + HALF + d, mask=inside, other=0.0)
        tl.store(values_ptr + goal + d, left, mask=inside)
        tl.store(values_ptr + goal + HALF + d, right, mask=inside)


def forward(k, v, cos, sin, positions, slots, key_cache, value_cache):
    T, H, D = k.shape
    k, v, cos, sin = k.contiguous(), v.contiguous(), cos.contiguous(), sin.contiguous()
    positions, slots = positions.contiguous(), slots.contiguous()
    keys, values = k.new_empty(key_cache.shape), v.new_empty(value_cache.shape)
    keys.copy_(key_cache)
    values.copy_(value_cache)
    half = D // 2
    _append[(T, H)](
        k, v, cos, sin, positions, slots, keys, values, H, D, key_cache.shape[2], half, triton.next_power_of_2(half)
    )  # fmt: skip
    return keys, values


def target():
    return assay.Target(
        forward, golden, cases=[prompt, small, one_head], name="kv_append", outputs=("keys", "values"), backward=None
    )  # fmt: skip
