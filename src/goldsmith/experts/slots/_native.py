"""experts.slots on a CPU, by the native library: the kernels of experts.moe without the sum over slots."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from .._conventions import SLOT_NAMES, MoeOptions
from .._native_abi import NativeCall
from ..moe._native import float16


def unsupported(tensors: dict, options: dict) -> str | None:
    return float16(tensors)


def forward(*tensors: Tensor | None, **options: Unpack[MoeOptions]) -> tuple[Tensor, Tensor]:
    x, ids = tensors[:2]
    o = torch.empty((*ids.shape, x.shape[-1]), dtype=torch.float32, device="cpu")  # type: ignore[union-attr]
    flags = torch.empty(ids.shape, dtype=torch.uint8, device="cpu")  # type: ignore[union-attr]
    into(o, flags, *tensors, **options)
    return o, flags


def into(o: Tensor, flags: Tensor | None, *tensors: Tensor | None, **options: Unpack[MoeOptions]) -> None:
    """Like `forward`, but writes to `o` and `flags`."""
    named: dict[str, Any] = dict(zip(SLOT_NAMES, tensors, strict=True))
    call = NativeCall(named, options)
    call.keep("rows", o.view(call.tokens * call.slots, call.hidden))
    if flags is not None:
        call.keep("flags", flags.view(-1))
    call.run("forward", "experts.slots", named["topk_ids"])
