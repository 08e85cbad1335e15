"""Explains the wrong tensor by what the golden knows: terms, ratios and patterns of one tensor.

Terms are the golden's stages, inputs and output gradients that fit the tensor's shape, larger ones summed over their
leading axes, and for a gradient the contribution of each forward stage: the part of the golden's gradient that
disappears when that stage's own gradient is zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...bounds.bounded import SLACK
from ...golden.golden_results import GoldenResults
from ...golden.golden_tensor import GoldenTensor
from ...judge.examination import Examination
from ..experiments.isolate import reach
from ..facts.evidence import ErrorPattern, Fit, Ratio
from ..facts.numbers import known
from .patterns import patterns
from .ratios import alone, ratios
from .regression import regress

_PATHS = 32  # forward stages whose paths are followed, at most; each costs one run of the golden


@dataclass
class Fitted:
    """The explanations of one tensor."""

    fits: list[Fit] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    patterns: list[ErrorPattern] = field(default_factory=list)


def fit(examination: Examination, name: str, kind: str, got: Tensor, *, terms: bool = True) -> Fitted:
    """Ratios and patterns of tensor `name` as the candidate returned it, in its own dtype; with `terms` also its terms.

    Terms may need several runs of the golden. Integers get only ratios, masks get nothing.
    """
    ref = examination.ref
    against = ref.reference(name, kind, noise=False)
    if against is None or got.dtype == torch.bool or got.shape != against.bounded.value.shape:
        return Fitted()
    golden, bound = against.bounded.value.double(), against.bounded.bound.double()
    names = known(examination.material.scalars, examination.material.sizes, examination.material.inputs)
    if not got.is_floating_point():
        return Fitted(ratios=ratios(name, got.double(), golden, segments=against.segments, numbers=names))
    same = {n: t for n, t in ref.values.items() if n != name and t.is_floating_point() and t.numel() == golden.numel()}
    results = {n for n, _, _ in examination.first.results()}
    out = Fitted()
    out.patterns = patterns(name, got, golden, bound=bound, others={n: t for n, t in same.items() if n in results})
    y = got.detach().double()
    factors = {n: t for n, t in _everything(ref, name, golden).items() if 1 < t.numel() < golden.numel()}
    # includes the rounding of the store, since a bound may be 0
    rounded = torch.maximum(bound, torch.finfo(got.dtype).eps * golden.abs())
    out.ratios = ratios(name, y, golden, bound=rounded, segments=against.segments, numbers=names)
    if not out.ratios:
        out.ratios = alone(name, y, golden, rounded, _other_results(examination, name), names)
    if not terms:
        return out
    named_terms = {**_everything(ref, name, golden), **_paths(ref, name)}
    for other in _independent_equals(examination, name, y, bound, named_terms):
        named_terms.pop(other), factors.pop(other, None)
    out.fits = regress(name, y, golden, named_terms, factors=factors, bound=bound, numbers=names)
    if not out.fits:
        out.fits = _by_segment(name, y, against, named_terms, factors, names)
    if not (out.fits or out.ratios or out.patterns):
        _ratios_in_block(out, name, y, against, named_terms, factors, names)
    return out


def _other_results(examination: Examination, name: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(got, golden, bound) of every other result with the golden's shape."""
    for other, kind, got in examination.first.results():
        against = None if got is None or other == name else examination.ref.reference(other, kind, noise=False)
        if got is None or against is None or not got.is_floating_point() or got.shape != against.bounded.value.shape:
            continue
        golden = against.bounded.value
        yield got.double(), golden, torch.maximum(against.bounded.bound, torch.finfo(got.dtype).eps * golden.abs())


def _independent_equals(
    examination: Examination, name: str, y: Tensor, bound: Tensor, terms: dict[str, Tensor]
) -> list[str]:
    """Stages that equal `y` although the golden's tensor does not depend on them: they explain nothing.

    A golden may also compute values that it does not return, such as its explicit backward beside autograd's, with the
    same mistake.
    """
    equal = [
        n for n, t in terms.items()
        if n in examination.ref.values and t.shape == y.shape and bool(((t - y).abs() <= 4 * SLACK * bound).all())
    ]  # fmt: skip
    stages = [n for n in equal if n in examination.ref.order and n not in examination.ref.outputs]
    return [n for n in stages if not bool(reach(examination, n).get(name, torch.zeros(())).any())]


def _ratios_in_block(
    out: Fitted, name: str, y: Tensor, against: GoldenTensor, terms: dict[str, Tensor], factors: dict[str, Tensor],
    names: dict[str, float],
) -> None:  # fmt: skip
    """Ratios of the wrong block, if the wrong elements are only part of the tensor."""
    golden, bound = against.bounded.value, against.bounded.bound
    block = wrong_block(y, golden, bound)
    if block is None:
        return

    def part(tensor: Tensor) -> Tensor:
        tensor = tensor.expand_as(golden)
        for axis, (lo, hi) in block.items():
            tensor = tensor.narrow(axis, lo, hi - lo)
        return tensor.contiguous()

    label = ", ".join(f"axis {axis} [{lo}..{hi - 1}]" for axis, (lo, hi) in block.items())
    mine, wanted, allowed = part(y), part(golden), part(bound)
    block_ratios = ratios(name, mine, wanted, bound=allowed, numbers=names)
    out.ratios = [replace(r, scope="segment", group=label) for r in block_ratios if r.scope == "tensor"]
    out.fits = regress(
        name, mine, wanted, {n: part(t) for n, t in terms.items()}, factors={n: part(t) for n, t in factors.items()},
        bound=allowed, numbers=names, where=label,
    )  # fmt: skip
    if not out.fits and not out.ratios:
        moved = patterns(name, mine.to(torch.float64), wanted, bound=allowed)
        out.patterns = [replace(p, params={**p.params, "where": label}, text=f"{p.text}, in {label}") for p in moved
                        if p.kind != "dtype_width"]  # fmt: skip


def wrong_block(y: Tensor, golden: Tensor, bound: Tensor) -> dict[int, tuple[int, int]] | None:
    """axis -> [lo, hi) of the smallest block with all wrong elements; None if it is the whole tensor or scattered."""
    wrong = ~((y - golden).abs() <= SLACK * bound) & torch.isfinite(golden)
    if not bool(wrong.any()) or not bool(torch.isfinite(y).all()):
        return None
    block = {}
    for axis in range(wrong.dim()):
        others = [d for d in range(wrong.dim()) if d != axis]
        at = torch.nonzero(wrong.any(dim=others) if others else wrong).flatten()
        lo, hi = int(at[0]), int(at[-1]) + 1
        if hi - lo < wrong.shape[axis]:
            block[axis] = (lo, hi)
    inside = 1
    for axis, size in enumerate(wrong.shape):
        lo, hi = block.get(axis, (0, size))
        inside *= hi - lo
    return block if block and int(wrong.sum()) >= 0.5 * inside and inside >= 2 else None


def _by_segment(
    name: str, y: Tensor, against: GoldenTensor, terms: dict[str, Tensor], factors: dict[str, Tensor],
    names: dict[str, float],
) -> list[Fit]:  # fmt: skip
    golden, bound = against.bounded.value, against.bounded.bound
    fits = []
    for segment, (axis, lo, hi) in against.segments.items():

        def part(tensor: Tensor, axis: int = axis, lo: int = lo, hi: int = hi) -> Tensor:
            return tensor.expand_as(golden).narrow(axis, lo, hi - lo)

        fits += regress(
            name, part(y), part(golden), {n: part(t) for n, t in terms.items()},
            factors={n: part(t) for n, t in factors.items()}, bound=part(bound), numbers=names, where=segment,
        )  # fmt: skip
    return fits


def _everything(ref: GoldenResults, name: str, like: Tensor) -> dict[str, Tensor]:
    """Stages, results, inputs and output gradients, shaped so that they broadcast to the tensor."""
    terms: dict[str, Tensor] = {}
    for source in (ref.values, ref.leaves):
        for other, tensor in source.items():
            if other in (name, f"saved.{name}", name.removeprefix("saved.")) or not tensor.is_floating_point():
                continue
            laid = aligned(tensor, like)
            if laid is not None:
                terms.setdefault(other, laid)
            else:
                summed = _summed(tensor, like)
                if summed is not None:
                    terms.setdefault(f"sum({other})", summed)
    return terms


def aligned(tensor: Tensor, like: Tensor) -> Tensor | None:
    """The tensor, shaped to broadcast to `like`: unchanged, or with axes of length 1 after those that they share."""
    for shape in (tensor.shape, (*tensor.shape, *[1] * (like.dim() - tensor.dim()))):
        try:
            torch.broadcast_to(tensor.reshape(shape), like.shape)
        except RuntimeError:
            continue
        return tensor.reshape(shape)
    return tensor.reshape(like.shape) if tensor.numel() == like.numel() else None


def _summed(tensor: Tensor, like: Tensor) -> Tensor | None:
    """The tensor summed over its leading axes, if the other axes are those of `like`."""
    extra = tensor.dim() - like.dim()
    if extra < 1 or tuple(tensor.shape[extra:]) != tuple(like.shape):
        return None
    return tensor.sum(tuple(range(extra)))


def _paths(ref: GoldenResults, name: str) -> dict[str, Tensor]:
    """For a gradient that autograd computes in the golden: the contribution that comes through each forward stage.

    A golden with its own backward may still use autograd; a stage without contribution then shows that it does not.
    """
    if not name.endswith(".grad"):
        return {}
    golden = ref.values[name]
    paths: dict[str, Tensor] = {}
    forward = [n for n in ref.order if n in ref.values and ref.values[n].is_floating_point() and f"{n}.grad" != name]
    if ref.material.target.golden_backward is None:
        forward = [n for n in forward if f"{n}.grad" in ref.values]
    else:
        ends = [forward.index(n) for n in ref.outputs if n in forward]
        forward = forward[: max(ends, default=0)]
    for stage in forward[:_PATHS]:
        cut = {**ref.decisions, stage: ref.values[stage], f"{stage}.grad": torch.zeros_like(ref.values[stage])}
        without = GoldenResults(ref.material, ref.run, cut, ref.seed).values.get(name)
        if without is None or without.shape != golden.shape:
            continue
        through = golden - without
        if bool(through.count_nonzero()) and not torch.equal(through, golden):
            paths[f"path through {stage}"] = through
    return paths
