"""Two results, or two named gradients inside a backward, that each hold the other's values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from ...edits.golden_edit import GoldenEdit, NamedEdit
from ...graph.tensors import floating

_NEAR = 1e-3  # relative to the size
Values = Mapping[str, Tensor]


def changes(golden: Values, candidate: Mapping[str, Tensor | None], tensor: str) -> Iterator[NamedEdit]:
    """Compares the golden's tensors with the candidate's by name; forward and backward are kept apart."""
    own, got, sent = golden.get(tensor), candidate.get(tensor), tensor.endswith(".grad")
    if own is None or got is None or not floating(own):
        return
    for name, other in golden.items():
        theirs = candidate.get(name)
        if name == tensor or name.endswith(".grad") != sent or theirs is None or not floating(other):
            continue
        if other.shape != own.shape or _same(own, other) or not (_same(got, other) and _same(theirs, own)):
            continue

        def composed(leaves: Values, run: Callable[[Values], Values], other: Tensor = other) -> Values:
            return {tensor: other.double()} if getattr(run, "until", "") == tensor else run({})

        text = f"{tensor} holds what should be {name}, and {name} holds {tensor}"
        yield NamedEdit("swapped_results", text, GoldenEdit(()), 0.9, {"with": name}, composed=composed, drawn=True)


def _same(a: Tensor, b: Tensor) -> bool:
    size = float(b.double().norm())
    return a.shape == b.shape and size > 0 and float((a.double() - b.double()).norm()) <= _NEAR * size
