"""experts.moe_int8 on a CPU, with the integer instructions of VNNI and AMX (csrc/experts/int8).

All instruction sets compute the same integer sums, without rounding. x is rounded once per token and h once per route.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from .._conventions import NAMES, MoeOptions, flat
from .._native_abi import NativeCall
from ..moe._native import float16
from ..packed.layout import Layout


def unsupported(tensors: dict, options: dict) -> str | None:
    return float16(tensors)


def forward(*tensors: Tensor | None, **options: Unpack[MoeOptions]) -> tuple[Tensor]:
    named: dict[str, Any] = dict(zip(NAMES, tensors, strict=True))
    if not named["topk_ids"].numel():  # the integer kernels divide by the number of slots
        return (torch.zeros_like(named["x"], memory_format=torch.contiguous_format),)
    layout = Layout.parse(options["layout"])
    group = layout.group_size or max(layout.hidden_size, layout.intermediate_size)
    call = NativeCall(named, options | {"int8": group})
    y = torch.empty_like(named["x"], memory_format=torch.contiguous_format)
    call.keep("y", flat(y))
    call.run("forward", "experts.moe", named["topk_ids"])
    return (y,)
