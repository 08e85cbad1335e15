"""Whether two runs agree: bit for bit, or within the noise of legal summation orders.

    |a - b| <= (sqrt(2 ln m) + 4 + 8 / sqrt(K m)) * pooled rms of the ensemble's own differences

Errors are divided by the rounding bound before pooling, so that rows of different scale do not hide each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..golden.golden_tensor import GoldenTensor

# both runs are drawn from the noise, and rounding to the stored dtype is coarser than a normal distribution
REPEATED = 1.5


@dataclass(frozen=True)
class Difference:
    """How far two runs are apart. equal: bit for bit; legal: within the noise; certain: also beyond the bounds."""

    equal: bool
    legal: bool
    certain: bool = True
    measured: float = 0.0
    limit: float = 0.0
    mask: Tensor | None = None
    text: str = ""


EQUAL = Difference(True, True, certain=False)


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal in every element, NaN included, and in shape and dtype."""
    if a is b:
        return True
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def difference(a: Tensor | None, b: Tensor | None, reference: GoldenTensor | None) -> Difference:
    """How two results of the same inputs differ, judged by the differences between legal summation orders."""
    if same_bits(a, b):
        return EQUAL
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return Difference(False, False, text=f"{_form(a)} and then {_form(b)}")
    mask = ~((a == b) | ((a != a) & (b != b)))
    text = f"{int(mask.sum())} of {mask.numel()} elements differ"
    if reference is None or not a.is_floating_point():
        return Difference(False, False, mask=mask, text=text)
    apart = (a.double() - b.double()).abs()
    limit = noise_limit(reference)
    over = mask & ~(apart <= limit)
    worst = int(torch.where(mask, apart / limit, torch.zeros_like(apart)).nan_to_num(math.inf).argmax())
    measured, allowed = float(apart.flatten()[worst]), float(limit.flatten()[worst])
    text += f", by up to {measured:.3g}; legal summation orders differ by at most {allowed:.3g}"
    certain = bool((mask & (apart > 2.04 * reference.bounded.bound)).any())
    return Difference(False, not bool(over.any()), certain, measured, allowed, mask, text)


def noise_limit(reference: GoldenTensor) -> Tensor:
    """The largest difference between two legal runs, per element.

    A result without rounding (a copy, a gather, x 2^k) has no legal orders. There, two runs may differ by the rounding
    of another formula, relative to the largest number of the tensor.
    """
    bound = reference.bounded.bound
    scale = torch.where(torch.isfinite(bound) & (bound > 0), bound, torch.ones_like(bound))
    draws = [r.double() for r in reference.ensemble if r.shape == bound.shape]
    m = max(bound.numel(), 2)
    pooled = 0.0
    if len(draws) > 1:
        pairs = [((x - y) / scale).square().nan_to_num(0.0).mean() for x, y in zip(draws, draws[1:], strict=False)]
        pooled = math.sqrt(float(torch.stack(pairs).mean()))
    factor = REPEATED * (math.sqrt(2 * math.log(m)) + 4 + 8 / math.sqrt(max(len(draws), 1) * m))
    store = torch.finfo(reference.store).eps if reference.store.is_floating_point else 0.0
    unit = torch.finfo(reference.compute).eps
    magnitude = reference.bounded.value.abs()
    limit = factor * pooled * scale + magnitude * (store + 4 * unit)
    limit = torch.minimum(limit, 2.04 * bound) if pooled else torch.maximum(limit, 2.04 * bound)
    largest = torch.where(torch.isfinite(magnitude), magnitude, 0.0).amax() if magnitude.numel() else 0.0
    limit = torch.where(bound > 0, limit, (store + 4 * unit) * largest)
    return torch.where(torch.isfinite(bound), limit, torch.full_like(limit, math.inf))


def _form(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
