"""Checks of a call's arguments, before any lane starts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...core.shapes import ShapeError, check_dtype, check_tensor
from ..errors import RoutingError

OP = "offload.Engine"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IDS = (torch.int32, torch.int64)
FEW = 64  # calls of at most this many routes are sorted and counted in Python


def check_call(layer: int, x: Tensor, ids: Tensor, weights: Tensor, hidden: int, device: torch.device) -> None:
    """Checks types, dtypes, shapes and devices; `counted` checks the values of the ids."""
    if not torch.is_grad_enabled() and _as_wanted(x, ids, weights, hidden, device):
        return
    for name, value in (("x", x), ("top_k_index", ids), ("top_k_weights", weights)):
        check_tensor(OP, name, value)
    check_dtype(OP, "x", x, DTYPES)
    check_dtype(OP, "top_k_index", ids, IDS)
    check_dtype(OP, "top_k_weights", weights, DTYPES)
    if x.dim() != 2 or ids.dim() != 2 or weights.shape != ids.shape or len(ids) != len(x) or x.shape[1] != hidden:
        raise ShapeError(
            f"{OP}: inconsistent shapes in layer {layer}\n"
            f"  x:             {list(x.shape)}, expected [T, {hidden}]\n"
            f"  top_k_index:   {list(ids.shape)}, expected [T, k]\n"
            f"  top_k_weights: {list(weights.shape)}, expected [T, k]"
        )
    for name, tensor in (("x", x), ("top_k_index", ids), ("top_k_weights", weights)):
        if tensor.device != device:
            raise ValueError(f"{OP}: {name} is on {tensor.device}, but the engine is on {device}; move it there")
    if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
        name = "x" if x.requires_grad else "top_k_weights"
        raise ValueError(
            f"{OP}: {name} requires grad, but the engine is for inference: call it under torch.no_grad() or "
            "torch.inference_mode(); use goldsmith.experts for training"
        )


def _as_wanted(x: Tensor, ids: Tensor, weights: Tensor, hidden: int, device: torch.device) -> bool:
    """Whether all arguments are valid; a quick check for every call, in a third of the time of the full one."""
    if type(x) is not Tensor or type(ids) is not Tensor or type(weights) is not Tensor:
        return False
    shape, routes = x.shape, ids.shape
    if device.type == "cuda":  # comparing indices takes a tenth of the time of comparing devices
        same_device = x.get_device() == ids.get_device() == weights.get_device() == device.index
    else:
        same_device = x.device == device and ids.device == device and weights.device == device
    return (
        same_device and x.dtype in DTYPES and ids.dtype in IDS and weights.dtype in DTYPES and len(shape) == 2
        and len(routes) == 2 and shape[0] == routes[0] and shape[1] == hidden and weights.shape == routes
    )  # fmt: skip


def _count_few(ids: Tensor, experts: int) -> tuple[list[int], bool] | None:
    """`counted` for few routes, in plain Python without torch's overhead; None if an id is out of range."""
    counts = [0] * (experts + 1)
    for value in ids.reshape(-1).tolist():
        if not -1 <= value <= experts:
            return None
        counts[value] += 1  # -1 counts in the last place, like `experts`
    return counts[:-1], counts[-1] > 0


def count_tokens(layer: int, ids: Tensor, experts: int) -> tuple[list[int], bool]:
    """(tokens of each expert, whether a route is skipped) for ids [T, k] on the CPU

    -1 and `experts` skip a route; any other id outside 0..experts-1 raises RoutingError.
    """
    if ids.numel() <= FEW:
        few = _count_few(ids, experts)
        if few is not None:
            return few
    values = ids.numpy()  # torch operations on a prompt's routes would wake its threads, see SortedRoutes
    lowest, highest = int(values.min()), int(values.max())
    if lowest < -1 or highest > experts:
        row, column = np.argwhere((values < -1) | (values > experts))[0].tolist()
        raise RoutingError(
            f"{OP}: top_k_index[{row}, {column}] of layer {layer} is {int(ids[row, column])}, expected an expert in "
            f"0..{experts - 1}, or -1 or {experts} for no expert"
        )
    flat = values.reshape(-1)
    if lowest >= 0 and highest < experts:
        return np.bincount(flat, minlength=experts).tolist(), False
    counts = np.bincount(flat + 1, minlength=experts + 2).tolist()
    return counts[1:-1], True
