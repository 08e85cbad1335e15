"""Finds where a value that is finite in the golden first becomes NaN or Inf in the candidate: stage and operation.

Memory starts as zeros here, so that leftover poison does not look like an overflow. Listens to operations as
`assay.watch` does, so that it names no operation of a kernel that torch's dispatcher does not see.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import torch
from torch import Tensor

from ...execute.memory_marks import ZERO_FILL
from ...execute.records import CandidateRun, RunSettings
from ...judge.examination import Examination
from ...nonfinite.events import Event
from ...nonfinite.watch import watch
from ...support.dispatch_mode import DispatchMode
from ..facts.evidence import NonFiniteOrigin
from ..graph.recording import source_line
from .isolate import named, order

PROBE = "provenance"
_ADDING = frozenset("add_ sub_ addcmul_ addmm_ baddbmm_ addmv_ index_add_ scatter_add_".split())
_FILLS = ("fill", "full", "masked", "where", "empty", "copy", "scatter", "index_put", "zeros", "ones")


def provenance(examination: Examination, own: CandidateRun) -> NonFiniteOrigin | None:
    """None if all finite values of the golden are finite in the candidate, at least with zeroed memory."""
    if _first(examination, own) is None:
        return None
    watching, freed = watch(norms=False), _Freed()
    with watching, freed:
        how = RunSettings(fill=ZERO_FILL, debug=own is not examination.first)
        run = examination.execute(PROBE, "zeroed memory", how, look=False)
    first = None if run.error is not None else _first(examination, run)
    if first is None:
        return None
    stage, got, mask = first
    nan = bool(torch.isnan(got)[mask].any())
    sentences = [f"{int(mask.sum())} elements that are finite in the golden become NaN or Inf first in {stage}"]
    event = _maker(watching.events)
    if event is not None:
        at = f", at {event.stack[0]}" if event.stack else ""
        why = "its argument is too large in float64 as well" if _exponential(event) else event.likely.evidence
        why = event.likely.evidence if event.likely.id != "unknown" else why
        sentences.append(
            f"the first operation that makes one from finite values is {event.op}{at}: {why}".removesuffix(": ")
        )
    cause = "" if event is None else _cause(event)
    if event is None and nan and freed.read:
        freed_text = f"the candidate itself fills memory with NaN{freed.filled}, and {freed.read}"
        sentences.append(
            f"{freed_text} adds to it afterwards: the buffer was reused without being set to zero"
            if freed.added
            else f"{freed_text} reads it afterwards: the memory had been freed"
        )
        cause = "uninitialised_accumulator" if freed.added else "use_after_free"
    return NonFiniteOrigin("nan" if nan else "inf", stage, "" if event is None else event.op, cause, tuple(sentences))


class _Freed(DispatchMode):
    """Records memory that the candidate fills with NaN, as a pool does on free, and the first operation that reads it.

    added: that operation adds to it in place, as to a sum that begins there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, str] = {}  # storage -> where it was filled
        self.filled = self.read = ""
        self.added = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name.split("::")[1]
        tensors = [a for a in args if isinstance(a, Tensor) and a.numel()]
        places = [t.untyped_storage().data_ptr() for t in tensors]
        if name == "fill_" and places and isinstance(args[1], float) and math.isnan(args[1]):
            if not _by_the_assay():
                self.places[places[0]] = source_line()
        elif name not in ("copy_", "zero_", "normal_", "uniform_") and not self.read:
            at = next((p for p, t in zip(places, tensors, strict=True) if p in self.places and _nan(t)), None)
            added = at is not None and name in _ADDING and at == places[0] and _nan(tensors[0])
            if at is not None and (added or not func._schema.is_mutable and not _view(func)):
                self.filled, self.read = (
                    f" at {self.places[at]}" if self.places[at] else "",
                    f"{name} at {source_line()}",
                )
                self.added = added
        return func(*args, **(kwargs or {}))


def _nan(t: Tensor) -> bool:
    return t.is_floating_point() and bool(torch.isnan(t).any())


def _view(func: Any) -> bool:
    return any(r.alias_info is not None for r in func._schema.returns)


def _by_the_assay() -> bool:
    """True if the nearest frame outside torch is the assay's own, which also fills memory."""
    frame = sys._getframe(2)
    while frame is not None and (
        f"{os.sep}torch{os.sep}" in frame.f_code.co_filename or frame.f_code.co_name == "__torch_dispatch__"
    ):  # skips frames of our dispatch modes, which only pass calls on
        frame = frame.f_back  # type: ignore[assignment]
    return frame is None or f"{os.sep}goldsmith{os.sep}assay{os.sep}" in frame.f_code.co_filename


def _first(examination: Examination, run: CandidateRun) -> tuple[str, Tensor, Tensor] | None:
    """(name, tensor, mask of its unexpected non-finite elements) of the first such tensor in the golden's order."""
    mine = named(run)
    for name in order(examination.ref, run):
        got, golden = mine.get(name, ("", None))[1], examination.ref.bounded[name].value
        if got is None or not got.is_floating_point() or got.shape != golden.shape:
            continue
        mask = ~torch.isfinite(got) & torch.isfinite(golden)
        if bool(mask.any()):
            return name, got.detach(), mask
    return None


def _maker(events: list[Event]) -> Event | None:
    """The first event that makes such a value from finite ones, and not by writing a constant."""
    born = [e for e in events if e.born and not any(f in e.op.split("::")[-1] for f in _FILLS)]
    return next((e for e in born if e.likely.id != "unknown"), born[0] if born else None)


def _cause(event: Event) -> str:
    """The cause of an event; the golden is finite there, so an exponential that overflows had too large an argument."""
    if event.kind == "inf" and _exponential(event):
        return "missing_max_shift"
    return event.likely.id if event.likely.id == "overflow" else ""


def _exponential(event: Event) -> bool:
    return event.op.split("::")[-1].rstrip("_") in ("exp", "exp2", "expm1")
