"""Error maps for the page: golden, candidate and error/limit, folded to two axes, each block's worst element."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..execute.run import CandidateRun
from ..golden.golden_results import GoldenResults
from ..golden.golden_tensor import GoldenTensor
from ..judge.examination import Examination
from ..report.results import ErrorMap

CELLS_BAD, CELLS_GOOD = 128, 32


def draw(examination: Examination) -> None:
    """Draw the plain run: a map of every tensor that fails, otherwise of the first output."""
    results = {n: (k, t) for n, k, t in examination.first.results() if t is not None}
    bad = [n for n in results if n in examination.bad]
    good = [n for n, (kind, _) in results.items() if kind == "output"][:1]
    for name in bad or good:
        draw_one(examination, "values", *results[name], examination.ref, name, bad=bool(bad))


def draw_run(
    examination: Examination, done: CandidateRun, reference: GoldenResults, run: str, names: Iterable[str]
) -> None:
    """Draw the tensors that are wrong in another run, next to the golden of that run's inputs."""
    results = {n: (k, t) for n, k, t in done.results() if t is not None}
    for name in names:
        if name in results:
            draw_one(examination, run, *results[name], reference, name)


def draw_one(
    examination: Examination,
    run: str,
    kind: str,
    tensor: Tensor,
    references: GoldenResults,
    name: str,
    *,
    bad: bool = True,
) -> None:
    """Add one map, unless this case already shows the tensor from an earlier run that had it wrong."""
    key = f"{examination.label} {name}"
    reference = references.reference(name, kind, noise=False)
    if (key in examination.maps and examination.maps[key].bad) or reference is None:
        return
    if tensor.is_floating_point() and tensor.numel() and tensor.shape == reference.bounded.value.shape:
        cells = CELLS_BAD if bad else CELLS_GOOD
        examination.maps[key] = error_map(examination.label, run, tensor, reference, cells, bad)


def error_map(case: str, run: str, got: Tensor, reference: GoldenTensor, cells: int, bad: bool) -> ErrorMap:
    """|got - golden| / bound and both values, rows = all axes but the last, as at most cells x cells blocks.

    Two equal infinities, or two NaN, count as no error.
    """
    golden, bound = reference.bounded.value, reference.bounded.bound
    same = (got == golden) | (got.isnan() & golden.isnan())
    error = (got.double() - golden).abs().masked_fill(same, 0.0)
    ratio = torch.where(error == 0, torch.zeros_like(error), error / bound).nan_to_num(nan=math.inf, posinf=math.inf)
    fold = (-1, got.shape[-1]) if got.dim() else (1, 1)
    last = {n: (lo, hi) for n, (axis, lo, hi) in reference.segments.items() if axis in (-1, got.dim() - 1)}
    grids = [_blocks(t.detach().reshape(fold), cells) for t in (golden, got.double(), ratio)]
    rows, columns = golden.reshape(fold).shape
    return ErrorMap(
        reference.name, case, (rows, columns), grids[0], grids[1], grids[2], segments=last, bad=bad, run=run
    )


def _blocks(t: Tensor, cells: int) -> list[list[float]]:
    """The element of largest magnitude of each block."""
    t = t.cpu()
    for axis in (0, 1):
        size = -(-t.shape[axis] // cells)
        if size > 1:
            pieces = t.split(size, axis)
            t = torch.stack([p.gather(axis, _key(p).argmax(axis, keepdim=True)).squeeze(axis) for p in pieces], axis)
    return [[_short(v) for v in row] for row in t.tolist()]


def _key(t: Tensor) -> Tensor:
    return t.abs().nan_to_num(nan=math.inf)


def _short(value: float) -> float:
    return float(f"{value:.4g}")
