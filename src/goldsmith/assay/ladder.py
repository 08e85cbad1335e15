"""The verdict ladder for one tensor: CERTAIN, STATISTICAL, SYSTEMATIC, QUALITY (stub)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .bounds import Bounded
from .results import Finding, Location, Note, Row


@dataclass
class Reference:
    """What one tensor is judged by.

    ensemble: the legal runs' tensors of this name (empty list: rungs 2 to 4 keep silent).
    segments: name -> (axis, lo, hi); axes: names of the tensor's axes for Location (default "0", "1", ...).
    compute: precision promised for sums; tensor_cores: True where products may be truncated (GPU), which turns a bias
    toward zero inside the bound into QUALITY.
    """

    name: str
    kind: str  # output | saved | grad | stage
    store: torch.dtype
    bounded: Bounded
    ensemble: list[Tensor] = field(default_factory=list)
    segments: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    axes: tuple[str, ...] = ()
    compute: torch.dtype = torch.float32
    tensor_cores: bool = False


@dataclass
class Judgement:
    """One row for the table; findings (empty when right); notes (flushes_subnormals, not_proven)."""

    row: Row
    findings: list[Finding] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(f.rung == "QUALITY" for f in self.findings)


def judge(
    name: str,
    got: Tensor | None,
    ref: Reference,
    *,
    case: str = "",
    run: str = "values",
    probe: str = "values",
    confirm: Callable[[int], tuple[Tensor, Reference]] | None = None,
) -> Judgement:
    """Hold `got` to `ref`, rung by rung; the first rung that finds something ends it.

    got: the candidate's tensor as it was stored (None: missing, CERTAIN).
    confirm(attempt) -> (candidate's tensor, reference) on a fresh seed with a fresh ensemble: statistical, systematic and quality
    alarms count only when it repeats them; without it they are not raised at all. attempt is 1, 2, ...
    """
    raise NotImplementedError


def locate(name: str, bad: Tensor, ref: Reference) -> Location:
    """Where the True elements of `bad` lie: segments, index ranges per axis, share, and a sentence."""
    raise NotImplementedError
