"""experts.slots: how it is fast on a CPU; the kernels of experts.moe before their sum (csrc/experts/forward.h)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._common import SLOT_NAMES
from .._native_abi import Call
from ..moe._native import float16


def unsupported(tensors: dict, options: dict) -> str | None:
    return float16(tensors)


def forward(*tensors: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    named: dict[str, Any] = dict(zip(SLOT_NAMES, tensors, strict=True))
    x, ids = named["x"], named["topk_ids"]
    call = Call(named, options)
    o = call.keep("rows", torch.empty(call.tokens * call.slots, call.hidden))
    flags = call.keep("flags", torch.empty(call.tokens * call.slots, dtype=torch.uint8))
    call.run("forward", "experts.slots", ids)
    return o.view(*ids.shape, x.shape[-1]), flags.view(ids.shape)
