"""Whole numbers and flags that rounding may change: a rounded quotient, a comparison, a place among equals.

An element is determined if the golden gives the same number when every operator rounds once more, and when inputs move
by a hair, which separates equal ones. The other elements may be any of these answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from . import kinks

NUDGES = 8  # falling, rising, then random ones


def nudged_runs(
    evaluate: Callable[[dict[str, Tensor]], dict[str, Tensor]], leaves: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Results of the golden in float64 for inputs that move by a relative HAIR, each element in its own direction.

    Runs that raise are left out.
    """
    moving = {n: t for n, t in leaves.items() if t.is_floating_point()}
    results = []
    for number in range(NUDGES if moving else 0):
        try:
            results.append(evaluate({**leaves, **{n: _nudged(t, n, number) for n, t in moving.items()}}))
        except (RuntimeError, TypeError, ValueError):
            continue
    return results


def _nudged(t: Tensor, name: str, number: int) -> Tensor:
    """The input, moved; whole numbers away from 0, because a cast to integers truncates those that are labels."""
    moved = kinks.nudged(t, name, number, kinks.HAIR)
    outward = t + (moved - t).abs() * torch.where(t < 0, -1.0, 1.0)
    return torch.where(t == t.round(), outward, moved)


def undetermined(golden: Tensor, runs: list[Tensor]) -> Tensor:
    """Mask of the elements that differ from the golden's in some of these runs."""
    masks = [run.to(torch.float64) != golden for run in runs]
    return torch.stack(masks).any(0) if masks else torch.zeros(golden.shape, dtype=torch.bool, device=golden.device)


def answered(tensor: Tensor, golden: Tensor, runs: list[Tensor]) -> Tensor:
    """Mask of the candidate's elements that differ from the golden's and are what one of these runs gives."""
    actual = tensor.to(golden.device, torch.float64)
    masks = [actual == run.to(torch.float64) for run in runs]
    return torch.stack(masks).any(0) & (actual != golden) if masks else torch.zeros_like(actual, dtype=torch.bool)
