"""Small questions about the values that operators read and make."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def replaced(args: tuple, i: int, value: Any) -> tuple:
    return (*args[:i], value, *args[i + 1 :])


def floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.float64, torch.float32)


def masks(x: Any) -> bool:
    """Whether the tensor's storage holds only 0 and 1, and both of them."""
    if not floating(x) or not x.numel():
        return False
    lying = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
    return bool(((lying == 0) | (lying == 1)).all()) and bool((lying != lying[:1]).any())


def whole(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def seen_through(new: Tensor, view: Tensor) -> Tensor | None:
    """`new`, which replaces a whole storage, seen through the layout of `view`; None if the sizes do not fit."""
    if view.untyped_storage().nbytes() != new.numel() * view.element_size() or new.dtype != view.dtype:
        return None
    return new.as_strided(view.shape, view.stride(), view.storage_offset())
