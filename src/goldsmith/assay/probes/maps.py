"""Error maps for the page: golden, candidate and error/limit as two-axis grids of each block's largest element."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..execute.records import CandidateRun
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
    examination: Examination, candidate_run: CandidateRun, reference: GoldenResults, run: str, names: Iterable[str]
) -> None:
    """Draw the tensors that are wrong in another run, next to the golden of that run's inputs."""
    results = {n: (k, t) for n, k, t in candidate_run.results() if t is not None}
    for name in names:
        if name in results:
            draw_one(examination, run, *results[name], reference, name)


def draw_one(
    examination: Examination,
    run: str,
    kind: str,
    tensor: Tensor,
    golden_results: GoldenResults,
    name: str,
    *,
    bad: bool = True,
) -> None:
    """Add one map, unless this case already shows this tensor from an earlier run in which it was wrong."""
    key = f"{examination.label} {name}"
    reference = golden_results.reference(name, kind, noise=False)
    if (key in examination.maps and examination.maps[key].bad) or reference is None:
        return
    if tensor.is_floating_point() and tensor.numel() and tensor.shape == reference.bounded.value.shape:
        cells = CELLS_BAD if bad else CELLS_GOOD
        examination.maps[key] = error_map(examination.label, run, tensor, reference, cells, bad)


def error_map(case: str, run: str, candidate: Tensor, reference: GoldenTensor, cells: int, bad: bool) -> ErrorMap:
    """The golden, the candidate and |candidate - golden| / bound, as grids of at most cells x cells blocks.

    The last axis is the columns, and all other axes together are the rows. Two equal infinities, or two NaN, count as
    no error.
    """
    golden, bound = reference.bounded.value, reference.bounded.bound
    same = (candidate == golden) | (candidate.isnan() & golden.isnan())
    error = (candidate.double() - golden).abs().masked_fill(same, 0.0)
    ratio = torch.where(error == 0, torch.zeros_like(error), error / bound).nan_to_num(nan=math.inf, posinf=math.inf)
    fold = (-1, candidate.shape[-1]) if candidate.dim() else (1, 1)
    last_segments = {
        n: (lo, hi) for n, (axis, lo, hi) in reference.segments.items() if axis in (-1, candidate.dim() - 1)
    }
    grids = [_blocks(t.detach().reshape(fold), cells) for t in (golden, candidate.double(), ratio)]
    rows, columns = golden.reshape(fold).shape
    return ErrorMap(
        reference.name, case, (rows, columns), grids[0], grids[1], grids[2], segments=last_segments, bad=bad, run=run
    )


def _blocks(t: Tensor, cells: int) -> list[list[float]]:
    """The element of largest magnitude of each block; NaN counts as the largest."""
    t = t.cpu()
    for axis in (0, 1):
        size = -(-t.shape[axis] // cells)
        if size > 1:
            pieces = t.split(size, axis)
            t = torch.stack(
                [p.gather(axis, _magnitude(p).argmax(axis, keepdim=True)).squeeze(axis) for p in pieces], axis
            )
    return [[_rounded(v) for v in row] for row in t.tolist()]


def _magnitude(t: Tensor) -> Tensor:
    return t.abs().nan_to_num(nan=math.inf)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
