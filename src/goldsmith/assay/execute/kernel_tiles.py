"""Tiles of Triton kernels that run in the interpreter, as tensors and back: what `stage` gets inside of a kernel."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ...core.tracing import TargetError

_CORE = "triton.language.core"


def is_tile(value: object) -> bool:
    """Whether it is a value of a Triton kernel, compiled or interpreted."""
    core = sys.modules.get(_CORE)
    return core is not None and isinstance(value, core.tensor)


def numbers(value: Any) -> Tensor | None:
    """A copy of an interpreted tile's numbers; None while the kernel is compiled."""
    data = getattr(value.handle, "data", None)
    if data is None or value.dtype.is_ptr():
        return None
    shape = [int(n) for n in value.type.shape] if value.type.is_block() else []
    copy = torch.tensor(data.view("int16") if value.dtype.is_bf16() else data)  # the interpreter holds its bits
    copy = copy.view(torch.bfloat16) if value.dtype.is_bf16() else copy
    return (copy if shape else copy.reshape(())).broadcast_to(shape).clone()


def tile_of(tensor: Tensor, like: Any) -> Any:
    """A tile with the numbers of a tensor, of the type of another tile."""
    data = tensor.view(torch.int16).numpy().view("uint16") if tensor.dtype == torch.bfloat16 else tensor.numpy()
    handle = type(like.handle)(data if like.type.is_block() else data.reshape(1), like.handle.dtype)
    return type(like)(handle, like.type)


def index(entry: object) -> object:
    """An entry of `at`: tiles of indices become tensors, numbers of the kernel become 0-d tensors."""
    return numbers(entry) if is_tile(entry) else getattr(entry, "value", entry)


def mask(name: str, value: object, tile: Tensor) -> Tensor | None:
    """The mask of a stage of a kernel, as large as the tile that it masks."""
    value = index(value)
    if value is None:
        return None
    flags = torch.as_tensor(value).bool()
    try:
        return flags.broadcast_to(tile.shape)
    except RuntimeError:
        raise TargetError(
            f"stage({name!r}, ..., mask=...): shape {list(flags.shape)}, expected one that broadcasts to the tile's "
            f"{list(tile.shape)}"
        ) from None
