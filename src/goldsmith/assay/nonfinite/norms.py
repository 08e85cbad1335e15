"""Norms of a watched run: measured on the device, read together, compared with the step before."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import events as facts

JUMP = 100.0  # a norm that grows or shrinks by this factor in one step gets a remark
FLUSH = 1 << 14
DOT = 1e-12, 1e12  # between these, squares and their sum stay far from the ends of float32
SCRATCH = 1 << 22  # elements of the largest scratch memory that is kept
Figures = Tensor | tuple[float, ...]  # least, greatest, norm, number of elements that are not zero


@dataclass(frozen=True)
class Norm:
    """One tensor in one step. norm: Euclidean; zeros: share of zeros; ratio: norm relative to the step before."""

    step: int
    name: str
    what: str
    norm: float
    absmax: float
    zeros: float
    ratio: float | None

    @property
    def remark(self) -> str:
        """ "not finite", "all zero", "jump" (100 times the norm of the step before, or a hundredth) or ""."""
        if not math.isfinite(self.absmax):
            return "not finite"
        if self.zeros == 1:
            return "all zero"
        jumped = self.ratio is not None and not 1 / JUMP < self.ratio < JUMP
        return "jump" if jumped else ""


def measure(tensor: Tensor, scratch: dict[int, Tensor]) -> Figures:
    """The figures of a tensor: as numbers on the CPU, where reading waits for nothing; otherwise on its device.

    scratch: memory by its size, which is used again: fresh memory takes longer to map than to fill.
    """
    # without dispatch modes: the watch must not watch itself
    with torch._C._DisableTorchDispatch():
        value = tensor.detach()
        nonzero = _scratch(value, scratch)
        torch.ne(value, 0, out=nonzero)  # count_nonzero takes 2.5 times as long (torch 2.13, CPU)
        least, greatest = facts.ends(value)
        if not value.is_cpu:
            return torch.stack([f.double() for f in (least, greatest, _norm(value), nonzero.sum())])
        low, high = least.item(), greatest.item()
        if value.dtype is torch.float32 and value.is_contiguous() and DOT[0] < facts.larger_end(low, high) < DOT[1]:
            flat = value.view(-1)
            norm = math.sqrt(torch.dot(flat, flat).item())  # half the time of the norm
        else:
            norm = _norm(value).item()
        return low, high, norm, nonzero.sum().item()


def _norm(value: Tensor) -> Tensor:
    wide = None if value.is_complex() else torch.float64 if value.dtype is torch.float64 else torch.float32
    return torch.linalg.vector_norm(value, dtype=wide)


def measure_ends(tensor: Tensor) -> Figures:
    """(least, greatest): as numbers on the CPU; otherwise on its device."""
    with torch._C._DisableTorchDispatch():
        low, high = facts.ends(tensor)
        return (low.item(), high.item()) if tensor.is_cpu else torch.stack([low.double(), high.double()])


def _scratch(value: Tensor, scratch: dict[int, Tensor]) -> Tensor:
    total = value.numel()
    if not value.is_cpu or total > SCRATCH:
        return torch.empty(value.shape, dtype=torch.float32, device=value.device)
    size = 1 << (total - 1).bit_length()
    if size not in scratch:
        scratch[size] = torch.empty(size)
    return scratch[size][:total].view(value.shape)


class Norms:
    """Collects figures on the device, and turns them into rows on demand."""

    def __init__(self) -> None:
        self.rows: list[Norm] = []
        self._waiting: list[tuple[int, str, str, int, Figures]] = []
        self._before: dict[tuple[str, str], float] = {}

    def add(self, step: int, name: str, what: str, total: int, figures: Figures) -> None:
        self._waiting.append((step, name, what, total, figures))
        if len(self._waiting) >= FLUSH:
            self.read()

    def read(self) -> list[Norm]:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return self.rows
        with torch.utils._python_dispatch._disable_current_modes():
            stacks = iter(read_stacks([w[4] for w in waiting if isinstance(w[4], Tensor)]))
        for step, name, what, total, figures in waiting:
            low, high, norm, nonzero = next(stacks) if isinstance(figures, Tensor) else figures
            before = self._before.get((name, what))
            ratio = norm / before if before else None
            self.rows.append(Norm(step, name, what, norm, facts.larger_end(low, high), 1 - nonzero / total, ratio))
            self._before[name, what] = norm
        return self.rows


def read_stacks(figures: list[Tensor]) -> list[list[float]]:
    """Small vectors on any devices as numbers, in the given order, with one transfer for each device."""
    values: dict[int, list[float]] = {}
    for device in {f.device for f in figures}:
        on = [i for i, f in enumerate(figures) if f.device == device]
        values.update(zip(on, torch.stack([figures[i] for i in on]).tolist(), strict=True))
    return [values[i] for i in range(len(figures))]
