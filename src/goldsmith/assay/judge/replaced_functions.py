"""Functions of torch, Python or the assay that a candidate in this process replaces: reported, and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..report.results import CERTAIN
from .examination import Examination
from .known_functions import KnownFunctions

_FUNCTIONS: list[KnownFunctions] = []  # as they were before the first check of this process


@contextmanager
def unreplaced(examination: Examination) -> Iterator[None]:
    """Context of a case: what it replaces in torch or in the assay is a finding, and is put back.

    A candidate in a process of its own can replace nothing here.
    """
    if examination.target.runner is not None:
        yield
        return
    if not _FUNCTIONS:
        _FUNCTIONS.append(KnownFunctions())
    before = set(_FUNCTIONS[0].replaced())
    try:
        yield
    finally:
        new = set(_FUNCTIONS[0].replaced()) - before
        for name in sorted(new):
            text = f"the candidate replaced {name}, which everything else in this process uses, too"
            examination.find(CERTAIN, "values", name, text, trick="patched_runtime", kind="patched_runtime")
        if new:
            _FUNCTIONS[0].restore(new)
