"""Describes a wrong tensor: zeros, flipped signs, a constant factor, a permutation, another tensor. Notes only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..judge.examination import Examination

ALIKE = 0.999  # correlation from which two tensors count as the same
ROWS = 256
ID = "pattern"


def run(examination: Examination) -> None:
    golden = {n: b.value for n, b in examination.ref.bounded.items()}
    for name, _, tensor in examination.first.results():
        expected = golden.get(name)
        if name not in examination.bad or tensor is None or expected is None or not tensor.is_floating_point():
            continue
        if tensor.shape != expected.shape or tensor.numel() < 2:
            continue
        others = {n: g for n, g in golden.items() if n != name and g.shape == expected.shape}
        phrases = patterns(tensor.double(), expected, others)
        if phrases:
            examination.note(ID, name, f"{name} {'; '.join(phrases)}")


def patterns(actual: Tensor, golden: Tensor, others: dict[str, Tensor]) -> list[str]:
    """Phrases that describe how `actual` differs from `golden`, the most informative first."""
    finite = torch.isfinite(actual) & torch.isfinite(golden)
    nonzero = finite & (golden != 0)
    if not bool(nonzero.any()):
        return []
    phrases = []
    zeros = float(((actual == 0) & nonzero).sum()) / float(nonzero.sum())
    if zeros > 0:
        phrases.append(f"is zero in {zeros:.1%} of the elements where the golden is not")
    if zeros == 1.0:
        return phrases
    phrases += _halves(actual, golden, nonzero)
    actual, golden = torch.where(finite, actual, 0.0), torch.where(finite, golden, 0.0)
    straight = alike(actual, golden)
    if straight < ALIKE:
        phrases += _reordered(actual, golden, others)
    flipped = float(((actual * golden < 0) & nonzero).sum()) / float(nonzero.sum())
    if flipped > 0.05 and straight > -ALIKE:
        phrases.append(f"has the other sign in {flipped:.1%} of its elements")
    phrases += _factor(actual[nonzero], golden[nonzero])
    return phrases


def alike(a: Tensor, b: Tensor) -> float:
    """<a, b> / (|a| |b|)"""
    norm = float(a.norm() * b.norm())
    return float((a * b).sum()) / norm if norm > 0 and math.isfinite(norm) else 0.0


def _factor(actual: Tensor, golden: Tensor) -> list[str]:
    ratio = actual / golden
    middle = float(ratio.median())
    spread = float((ratio - middle).abs().median())
    if middle not in (0.0, 1.0) and spread <= 1e-3 * abs(middle) and abs(middle - 1) > 4 * spread:
        return [f"is {middle:.6g} times the golden (median of the ratios; half of them within {spread:.1g})"]
    return []


def _halves(actual: Tensor, golden: Tensor, nonzero: Tensor) -> list[str]:
    flat, mask = actual.flatten(), nonzero.flatten()
    half = flat.numel() // 2
    dead = (flat[half:][mask[half:]] == 0).all() | torch.isnan(flat[half:]).all()
    if half and bool(mask[half:].any()) and bool(dead) and bool((flat[:half] != 0).any()):
        return ["is filled in its first half only: was it written in a narrower dtype?"]
    return []


def _reordered(actual: Tensor, golden: Tensor, others: dict[str, Tensor]) -> list[str]:
    for name, other in others.items():
        if abs(alike(actual, other)) > ALIKE:
            return [f"looks like the golden's {name}"]
    if golden.dim() >= 2:
        if golden.shape[-1] == golden.shape[-2] and alike(actual, golden.mT) > ALIKE:
            return ["looks like the golden with its last two axes transposed"]
        swapped = golden.mT.reshape(golden.shape)
        if alike(actual, swapped) > ALIKE or alike(actual.mT.reshape(golden.shape), golden) > ALIKE:
            return ["looks like the golden read with its last two strides swapped"]
    for axis in range(golden.dim()):
        for step in (1, -1, 2, -2):
            if golden.shape[axis] > 2 and alike(actual, golden.roll(step, axis)) > ALIKE:
                return [f"looks like the golden shifted by {step} along axis {axis}"]
    return _permuted(actual, golden)


def _permuted(actual: Tensor, golden: Tensor) -> list[str]:
    """Whether the rows of an axis are in another order."""
    for axis in range(golden.dim()):
        rows, golden_rows = (t.movedim(axis, 0).reshape(t.shape[axis], -1) for t in (actual, golden))
        if not 2 < len(rows) <= ROWS or rows.shape[1] < 2:
            continue
        match = torch.nn.functional.normalize(rows, dim=1) @ torch.nn.functional.normalize(golden_rows, dim=1).T
        best, index = match.max(1)
        if float(best.min()) > ALIKE and len(index.unique()) == len(index):
            return [f"looks like the golden with the rows of axis {axis} in another order"]
    return []
