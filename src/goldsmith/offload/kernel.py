"""The experts' kernels over blocks: `experts.slots` without its checks, which the Engine does once for all lanes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..core import native
from ..experts import PackedExperts, slots
from ..experts._common import FACTORS

NO_LORA: dict[str, Any] = dict.fromkeys(FACTORS)


def rows_of(
    x: Tensor,
    ids: Tensor,
    base: PackedExperts,
    rows: Tensor,
    flags: Tensor,
    options: Mapping[str, Any],
    threads: int = 0,
) -> None:
    """rows[t k + j] = what expert ids[t, j] of `base` gives for x[t]; flags[t k + j] = 1 where it has NaN or Inf

    x [T, H] contiguous, float32 or bfloat16; ids [T, k], -1 to skip (row and flag become 0). rows [T k, H] float32 and
    flags [T k] uint8, written whole. options: activation, alpha, limit. The native kernels on a CPU that has them, on
    `threads` threads (0: torch's number); else the operator's own choice.
    """
    if x.is_cpu and native.reason() is None:
        native_call(x, ids, base, rows, flags, options, threads).run("forward", "offload.Engine", ids)
        return
    T, k = ids.shape
    slots(x, ids, base, out=rows.view(T, k, -1), flags=flags.view(T, k), **options)


def native_call(
    x: Tensor, ids: Tensor, base: PackedExperts, rows: Tensor, flags: Tensor, options: Mapping[str, Any], threads: int
) -> Any:
    """The arguments of the library's call that does what `rows_of` says, and what they point at."""
    from ..experts._native_abi import Call

    named = {
        "x": x, "topk_ids": ids, "gate_up": base.gate_up, "down": base.down, "gate_up_bias": base.gate_up_bias,
        "down_bias": base.down_bias, **NO_LORA,
    }  # fmt: skip
    call = Call(named, {**options, "layout": base.layout.text})
    if threads:
        call.args.threads = threads
    call.keep("rows", rows)
    call.keep("flags", flags)
    return call


@functools.cache
def loaded(module: str) -> ModuleType:
    """A module of GPU kernels: by name, and when it is needed."""
    return importlib.import_module(f"goldsmith.{module}")


def kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    """What kernels are given for an x of this dtype: float32 for float16, which it holds exactly."""
    return torch.float32 if dtype == torch.float16 else dtype
