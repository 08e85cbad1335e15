"""Triton kernels beside the experts: the merge of rows, which also flags non-finite sums, and transfers of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...experts._kernels.launch import Launch

_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["x_ptr", "ids_ptr", "x_there_ptr", "ids_there_ptr"])
def _fetch_kernel(x_ptr, ids_ptr, x_there_ptr, ids_there_ptr, H, K, BLOCK: tl.constexpr, IDS: tl.constexpr):
    """Writes x [H] and ids [K] of one token to host memory."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_there_ptr + column, tl.load(x_ptr + column, column < H), column < H)
    if tl.program_id(0) == 0:
        j = tl.arange(0, IDS)
        tl.store(ids_there_ptr + j, tl.load(ids_ptr + j, j < K), j < K)


def fetch(x: Tensor, ids: Tensor, x_there: Tensor, ids_there: Tensor) -> None:
    """Copies contiguous x [1, H] and ids [1, K] to pinned host memory: one launch instead of two copies."""
    launch, blocks = _fetching(x.shape[1], ids.shape[1], x.dtype, ids.dtype, x.device)
    launch((blocks, 1, 1), x.device, x, ids, x_there, ids_there)


@lru_cache(maxsize=64)
def _fetching(hidden: int, k: int, dtype: torch.dtype, of_ids: torch.dtype, device: torch.device) -> tuple[Launch, int]:
    block = min(1024, triton.next_power_of_2(hidden))
    return Launch(_fetch_kernel, (hidden, k, block, triton.next_power_of_2(k)), _WARPS), -(-hidden // block)


@triton.jit(do_not_specialize_on_alignment=["x_ptr", "tokens_ptr", "there_ptr"])
def _gather_kernel(x_ptr, tokens_ptr, there_ptr, H, BLOCK: tl.constexpr):
    """there[r] = x[tokens[r]]; the program ids are (r, block of columns)"""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    tl.store(there_ptr + row * H + column, tl.load(x_ptr + token * H + column, column < H), column < H)


def gather(x: Tensor, tokens: Tensor, there: Tensor) -> None:
    """there[r] = x[tokens[r]] for x [T, H]; tokens int32 [n] and `there` [n, H] are in pinned host memory."""
    launch, blocks = _gathering(x.shape[1], x.dtype, x.device)
    if len(tokens):
        launch((len(tokens), blocks, 1), x.device, x, tokens, there)


@lru_cache(maxsize=64)
def _gathering(hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Launch, int]:
    block = min(1024, triton.next_power_of_2(hidden))
    return Launch(_gather_kernel, (hidden, block), _WARPS), -(-hidden // block)


_POINTERS = ["rows_ptr", "place_ptr", "w_ptr", "out_ptr", "dirty_ptr", "there_ptr"]


@triton.jit(do_not_specialize=["LEADING"], do_not_specialize_on_alignment=_POINTERS)
def _merge_kernel(rows_ptr, place_ptr, w_ptr, out_ptr, dirty_ptr, there_ptr, LEADING, H, K: tl.constexpr,
                  BLOCK: tl.constexpr, FETCH: tl.constexpr):  # fmt: skip
    """out[t] = sum over j, in order, of w[t, j] rows[place[t, j]]; for place -1 neither row nor weight is read

    FETCH: the first LEADING rows are read from there_ptr, in host memory, and also stored to rows_ptr.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros((BLOCK,), tl.float32)
    fetched = ()
    for j in tl.static_range(K):  # loads all rows at once: a skipped one is 0, which changes no sum
        place = tl.load(place_ptr + token * K + j).to(tl.int64)
        w = tl.load(w_ptr + token * K + j, place >= 0, 0.0).to(tl.float32)
        if FETCH:
            leads = (place >= 0) & (place < LEADING)
            there = tl.load(there_ptr + place * H + column, inside & leads, 0.0)
            row = tl.load(rows_ptr + place * H + column, inside & (place >= LEADING), 0.0)
            row = tl.where(leads, there, row)
            fetched = fetched + (there,)
        else:
            row = tl.load(rows_ptr + place * H + column, inside & (place >= 0), 0.0)
        total += w * row
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * H + column, out, inside)
    wide = out.to(tl.float32)
    wrong = tl.sum(tl.where(inside & (wide - wide != 0), 1, 0))
    if wrong > 0:
        tl.store(dirty_ptr, 1)
    if FETCH:
        for j in tl.static_range(K):
            place = tl.load(place_ptr + token * K + j).to(tl.int64)
            tl.store(rows_ptr + place * H + column, fetched[j], inside & (place >= 0) & (place < LEADING))


def merger(
    rows: Tensor, place: Tensor, weights: Tensor, dtype: torch.dtype, dirty: Tensor, fetched: Tensor | None = None
) -> tuple[Tensor, Callable[[], None]]:
    """(out, launch): out [T, H] in `dtype` is filled when launch() is called

    rows [*, H] float32, place int32 with T k numbers, weights [T, k].
    dirty: int32 [1], possibly in pinned host memory; set to 1 if a sum is not finite, never to 0.
    fetched: the first rows, in pinned host memory; the kernel reads them there and stores them to `rows`.
    """
    T, k = weights.shape
    hidden = rows.shape[1]
    out = torch.empty(T, hidden, dtype=dtype, device=rows.device)
    launch, blocks = _launch(hidden, k, fetched is not None, dtype, weights.dtype, rows.device)
    there, leading = (rows, 0) if fetched is None else (fetched, len(fetched))

    def merge() -> None:
        if T:
            launch((T, blocks, 1), rows.device, rows, place, weights, out, dirty, there, leading)

    return out, merge


@lru_cache(maxsize=64)
def _launch(
    hidden: int, k: int, fetch: bool, dtype: torch.dtype, of_weights: torch.dtype, device: torch.device
) -> tuple[Launch, int]:
    """The kernel and its programs per row; cached per dtypes and device."""
    block = min(512, triton.next_power_of_2(hidden))
    return Launch(_merge_kernel, (hidden, k, block, fetch), _WARPS), -(-hidden // block)
