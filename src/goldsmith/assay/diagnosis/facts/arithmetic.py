"""Ratios and patterns of the first wrong tensor: arithmetic on existing tensors, without a run of the kernel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...golden.golden_tensor import GoldenTensor
from ...judge.examination import Examination
from .evidence import ErrorPattern, Ratio
from .numbers import known
from .patterns import patterns
from .ratios import alone, ratios


def arithmetic(
    examination: Examination, name: str, got: Tensor, against: GoldenTensor
) -> tuple[list[Ratio], list[ErrorPattern]]:
    """For tensor `name` as the candidate returned it, in its own dtype. Integers have only ratios, masks nothing."""
    golden, bound = against.bounded.value.double(), against.bounded.bound.double()
    if got.dtype == torch.bool or got.shape != golden.shape:
        return [], []
    material, ref, y = examination.material, examination.ref, got.detach().double()
    names = known(material.scalars, material.sizes, material.inputs)
    if not got.is_floating_point():
        return ratios(name, y, golden, segments=against.segments, numbers=names), []
    # includes the rounding of the store, since a bound may be 0
    rounded = torch.maximum(bound, torch.finfo(got.dtype).eps * golden.abs())
    constant = ratios(name, y, golden, bound=rounded, segments=against.segments, numbers=names)
    constant = constant or alone(name, y, golden, rounded, _other_results(examination, name), names)
    results = {n for n, _, _ in examination.first.results()} - {name}
    others = {n: t for n, t in ref.values.items() if n in results and t.is_floating_point()}
    return constant, patterns(name, got, golden, bound=bound, others=others)


def _other_results(examination: Examination, name: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(got, golden, bound) of every other result with the golden's shape."""
    for other, kind, got in examination.first.results():
        against = None if got is None or other == name else examination.ref.reference(other, kind, noise=False)
        if got is None or against is None or not got.is_floating_point() or got.shape != against.bounded.value.shape:
            continue
        golden = against.bounded.value
        yield got.double(), golden, torch.maximum(against.bounded.bound, torch.finfo(got.dtype).eps * golden.abs())
