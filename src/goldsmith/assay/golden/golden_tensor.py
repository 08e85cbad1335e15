"""GoldenTensor: one result of the golden with its proven bound, its legal runs and its noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..bounds.bounded import SLACK, Bounded
from ..noise import formula_rounding, patterns
from ..noise.noise_floor import Noise


@dataclass
class GoldenTensor:
    """One result of the golden, with everything that a candidate's tensor is judged by.

    ensemble: tensors of this name from the legal runs (empty list: rungs 2 to 4 find nothing).
    segments: name -> (axis, lo, hi); axes: names of the tensor's axes for Location (default "0", "1", ...).
    compute: precision declared for sums; tensor_cores: True if products may be truncated (GPU), which turns a bias
    toward zero inside the bound into QUALITY.
    honest: further runs of the golden in compute precision, which show where it overflows itself.
    any_formula: errors of another formula's rounding are right everywhere, not only where numbers cancel.
    terms: size of the summands that may cancel in an equivalent formula (formula_rounding.terms).
    nearby: where any formula is right, computes how far rounded inputs move this result (nearby_inputs.moves).
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
    honest: list[Tensor] = field(default_factory=list)
    any_formula: bool = False
    terms: formula_rounding.Terms = formula_rounding.NO_TERMS
    nearby: Callable[[], Tensor] | None = None

    @cached_property
    def noise(self) -> Noise:
        return Noise(self.bounded, self.store, self.ensemble, self.compute)

    @property
    def allowed(self) -> Tensor:
        """The error up to which SLACK times it is right: the bound, or what an equal formula may round."""
        if not self.store.is_floating_point:
            return self.bounded.bound
        other = formula_rounding.limit(self.bounded, self.compute, self.terms, everywhere=self.any_formula)
        return torch.maximum(self.bounded.bound, other / SLACK)

    @cached_property
    def groups(self) -> patterns.Groups:
        return patterns.Groups(self.noise, self.axes, self.segments)
