"""Changes a slice of an input, and runs candidate and golden on the changed inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..declare.axis_names import axis_names
from ..execute.records import CandidateRun, Material
from ..golden.golden_results import GoldenResults
from ..golden.kinks import binary
from ..judge.examination import Examination, decided
from .decisions import with_undeclared

NAME = "taint"


@dataclass(frozen=True)
class Slice:
    """One index of one axis of one input. `random` slices are set to finite numbers, the others to NaN.

    In an input of zeros and ones alone, each element is flipped instead.
    """

    name: str
    axis: int
    index: int
    text: str
    random: bool
    binary: bool  # the input holds zeros and ones alone

    def of(self, tensor: Tensor) -> Tensor:
        """This slice of a tensor, as a view."""
        return tensor.select(self.axis, self.index) if tensor.dim() else tensor

    def filled(
        self, examination: Examination, value: float | None, material: Material | None = None, times: float = 1.0
    ) -> Material:
        """`material` (default: the case's) with this slice set to `value`; None: `times` large random numbers."""
        material = material or examination.material
        copy = material.inputs[self.name].clone(memory_format=torch.contiguous_format)
        part = self.of(copy)
        if self.binary:
            part.copy_(1 - part)
        elif value is None:
            generator = torch.Generator().manual_seed(examination.seed + self.axis)
            part.copy_(times * spread(part, generator) * far(examination.material.inputs[self.name]))
        else:
            part.fill_(value)
        return material.with_inputs({self.name: copy})


def spread(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers of random sign between 1/2 and 1; they differ, because equal numbers would tie in a maximum."""
    signs = torch.randint(0, 2, like.shape, generator=generator) * 2 - 1
    drawn = signs * (0.5 + 0.5 * torch.rand(like.shape, generator=generator, dtype=torch.float64))
    return drawn.to(like.device, non_blocking=like.is_cuda)


def changeable(t: Tensor) -> bool:
    """Whether an input can take other numbers; 8-bit dtypes only store, torch computes nothing in them."""
    return t.is_floating_point() and t.numel() > 0 and t.dtype.itemsize > 1


def slices(examination: Examination) -> list[Slice]:
    """The slices to try, without those that cover the same elements as another of their kind."""
    generator = torch.Generator().manual_seed(examination.seed + 11)
    out: list[Slice] = []
    for name, tensor in examination.material.inputs.items():
        if not changeable(tensor):
            continue
        names, flips = axis_names(tensor.shape, examination.case.sizes), binary(tensor)
        whole = False  # an axis of length 1 has one slice, the whole tensor; every such axis has the same one
        for axis in range(max(tensor.dim(), 1)):
            length = tensor.shape[axis] if tensor.dim() else 1
            middle = int(torch.randint(0, length, (1,), generator=generator))
            if length == 1 and whole:
                continue
            whole |= length == 1
            label = f"axis {names[axis]}" if tensor.dim() else "the scalar"
            wanted = [(i, False) for i in sorted({0, length - 1})] + [(middle, True)]
            if flips:
                wanted = [(i, True) for i in sorted({0, middle, length - 1})]
            out += [Slice(name, axis, i, f"{name}[{label} = {i}]", random, flips) for i, random in wanted]
    return out


def results(examination: Examination, run: CandidateRun) -> dict[str, Tensor]:
    """The floating results of a run that can be compared."""
    skip = examination.bad | set(examination.target.decisions)
    return {n: t for n, _, t in run.results() if t is not None and n not in skip and t.is_floating_point()}


def run_changed(examination: Examination, material: Material, label: str) -> tuple[CandidateRun, GoldenResults] | None:
    run = examination.execute(NAME, label, material=material, look=False)
    if run.error is not None:  # a candidate may refuse NaN, or numbers out of range
        return None
    return run, own_results(examination, material, run)


def nan_masks(
    examination: Examination, run: CandidateRun, references: GoldenResults
) -> list[tuple[str, Tensor, Tensor]]:
    """(tensor, silent, leaking): masks; silent: only the golden is NaN; leaking: only the candidate is NaN."""
    suspects = []
    for name, tensor in results(examination, run).items():
        expected = references.values.get(name)
        if expected is None or expected.shape != tensor.shape:
            continue
        silent = torch.isnan(expected) & ~torch.isnan(tensor)
        leaking = torch.isnan(tensor) & ~torch.isnan(expected)
        if bool((silent | leaking).any()):
            suspects.append((name, silent, leaking))
    return suspects


def far(t: Tensor) -> float:
    """A finite number far outside the finite values of `t`, and within its dtype.

    Not farther where `t` has an infinity: at the end of the range the rounding of one step decides about all of exp(x).
    """
    finite = torch.where(t.isfinite(), t, 0.0)
    return min(float(finite.abs().amax()) * 1024.0 + 1024.0, torch.finfo(t.dtype).max / 8)


def own_results(examination: Examination, material: Material, run: CandidateRun) -> GoldenResults:
    """The golden's results for the candidate's own decisions, and for its legal choices that are not declared."""
    results = examination.references(material, run, own_decisions(examination, run))
    return with_undeclared(examination, run, results)


def own_decisions(examination: Examination, run: CandidateRun) -> dict[str, Tensor]:
    """The candidate's own decisions, legal or not, so that only the results computed from them are compared."""
    decisions = {n: decided(run, n) for n in examination.target.decisions}
    return {n: t for n, t in decisions.items() if t is not None}
