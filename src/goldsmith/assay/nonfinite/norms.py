"""Norms of a watched run: measured on the device, read together, compared with the step before."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import events as facts

JUMP = 100.0  # a norm that grows or shrinks by this factor in one step gets a remark
FLUSH = 1 << 14
Figures = Tensor | tuple[float, float, float, float]  # least, greatest, norm, number of elements that are not zero


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


def measure(tensor: Tensor) -> Figures:
    """The figures of a tensor: as numbers on the CPU, where reading waits for nothing; otherwise on its device."""
    # without dispatch modes: the watch must not watch itself
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        value = tensor.detach()
        wide = torch.float64 if value.dtype in (torch.float64, torch.complex128) else torch.float32
        norm = torch.linalg.vector_norm(value, dtype=None if value.is_complex() else wide)
        nonzero = torch.empty(value.shape, dtype=torch.float32, device=value.device)
        torch.ne(value, 0, out=nonzero)  # count_nonzero takes 2.5 times as long (torch 2.13, CPU)
        low, high = facts.ends(value)
        if value.is_cpu:
            return low.item(), high.item(), norm.item(), nonzero.sum().item()
        return torch.stack([f.double() for f in (low, high, norm, nonzero.sum())])


def measure_ends(tensor: Tensor) -> Tensor | tuple[float, float]:
    """(least, greatest): as numbers on the CPU; otherwise on its device."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        low, high = facts.ends(tensor)
        return (low.item(), high.item()) if tensor.is_cpu else torch.stack([low.double(), high.double()])


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
