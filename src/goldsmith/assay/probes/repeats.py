"""Repeats of the first run, one with another number of threads: equal bits, or a spread within legal summation orders.

Three repeats of the same inputs are enough. On a CPU the repeats of the second-call probe count towards the three;
on a GPU, where races show by chance, this probe always runs three of its own. In Triton's interpreter, which runs
programs one after another, the run with another number of threads also runs them in another order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..execute.interpreter import WaitsForOthers
from ..execute.records import CandidateRun, RunSettings
from ..judge.agreement import same_bits
from ..judge.examination import Examination
from .second_call import agree

NAME = "repeats"
COUNT = 3
APART = "farther apart than legal orders of the golden lie"
BACKWARDS = "programs from the last to the first"
ORDERED = (
    "with its programs in another order the result is another, and a GPU promises no order: one program reads or "
    "writes what another one writes"
)
WIDER = f"a repeat with the same inputs gives another result, {APART}"


def run(examination: Examination) -> None:
    on_cpu = examination.material.candidate_device.type == "cpu"
    for i in range(COUNT - examination.repeated if on_cpu else COUNT):
        label = f"repeat {i + 1}"
        again = examination.execute(NAME, label)
        if examination.raised(NAME, label, again) or not agree(examination, NAME, label, again, WIDER):
            return
    if on_cpu:
        threads = 1 if torch.get_num_threads() > 1 else 2
        label = f"{threads} thread{'s' * (threads > 1)}"
        if examination.interpreted and _in_any_order(examination, threads):
            return
        other = examination.execute(NAME, label, RunSettings(threads=threads))
        if not examination.raised(NAME, label, other):
            agree(examination, NAME, label, other, f"with {label} the result is another, {APART}")


def _in_any_order(examination: Examination, threads: int) -> bool:
    """Judges a run with the programs of each launch in another order; whether it says all about other threads as well.

    If the run with both differences gives other results, a run with the other order alone tells which of them did it.
    """
    how = RunSettings(threads=threads, backwards=True)
    run = examination.execute(NAME, BACKWARDS, how)
    if WaitsForOthers.__name__ in str(run.error):
        text = "programs may wait for one another, so that they were not run in another order"
        examination.note("one_order", examination.target.name or "", text)
        return False
    if run.error is None and all(same_bits(a, b) for a, b in _pairs(examination.first, run)):
        return True
    run = examination.execute(NAME, BACKWARDS, RunSettings(backwards=True))
    return examination.raised(NAME, BACKWARDS, run) or not agree(examination, NAME, BACKWARDS, run, ORDERED)


def _pairs(first: CandidateRun, run: CandidateRun) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    named = {n: t for n, _, t in first.results()}
    return ((named.get(n), t) for n, _, t in run.results())
