"""The golden is checked before anybody is accused (stub)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class SelfCheck:
    """problems: sentences, each a reason for the verdict reference_fault; notes: kinks and gradients not confirmed."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@contextmanager
def storage(name: str) -> Iterator[None]:
    """Inside, a golden may make tensors narrower than float64: it models the storage format `name`, e.g. "int4"."""
    yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch.ones(3) and the like make `dtype` inside (running_bounds, legal_runs and self_check do this themselves)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def self_check(
    forward: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    gradient: Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]] | None,
    leaves: Mapping[str, Tensor],
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    seed: int = 0,
) -> SelfCheck:
    """Section 4: float64 everywhere, twice bit-equal, inputs unwritten, gradients against central differences.

    forward(leaves) -> {output: tensor}, decisions fixed; gradient(leaves, {"grad_<output>": cotangent}) -> {input: gradient}
    for the differentiable inputs (None: forward only). leaves: float64 inputs (integers as they are).
    shapes: output -> shape of the candidate's output, compared with the golden's.
    """
    raise NotImplementedError
