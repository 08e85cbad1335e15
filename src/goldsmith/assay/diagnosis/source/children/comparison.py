"""Compares the results of an edited copy with the golden's values and bounds, and with the results before the edit."""

from __future__ import annotations

import torch
from torch import Tensor

from ....bounds.bounded import SLACK


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return one is other
    return bool(((one == other) | (one != one) & (other != other)).all())


def wrong_share(tensor: Tensor | None, value: Tensor, bound: Tensor) -> float:
    """The share of elements that exceed the bound; 1 for a missing tensor or another shape."""
    if tensor is None:
        return 1.0 if bool(value.count_nonzero()) else 0.0
    if tensor.shape != value.shape:
        return 1.0
    right = _right(tensor, value, bound)
    wrong = right.numel() - int(right.count_nonzero())
    return wrong / max(1, right.numel()) if wrong else 0.0


def blamed_share(tensor: Tensor | None, before: Tensor | None, value: Tensor, bound: Tensor) -> float:
    """The share of wrong elements that were right before, or that are finite and others than before."""
    if tensor is None or before is None or tensor.shape != value.shape or before.shape != value.shape:
        return wrong_share(tensor, value, bound)
    new = torch.isfinite(tensor) & (tensor != before)
    blamed = ~_right(tensor, value, bound) & (_right(before, value, bound) | new.cpu())
    return int(blamed.count_nonzero()) / max(1, blamed.numel())


def _right(tensor: Tensor, value: Tensor, bound: Tensor) -> Tensor:
    got = tensor.detach().to("cpu", torch.float64)
    right = ((got - value).abs() <= SLACK * bound) | (got == value) | (torch.isnan(got) & torch.isnan(value))
    return right & (torch.isfinite(got) | ~torch.isfinite(value))
