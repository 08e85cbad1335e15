"""Repeats of the first run, one with another number of threads: equal bits, or a spread within legal summation orders.

Three repeats of the same inputs are enough. On a CPU the repeats of the second-call probe count towards the three;
on a GPU, where races show by chance, this probe always runs three of its own.
"""

from __future__ import annotations

import torch

from ..execute.records import RunSettings
from ..judge.examination import Examination
from .second_call import agree

NAME = "repeats"
COUNT = 3
APART = "farther apart than legal orders of the golden lie"
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
        other = examination.execute(NAME, label, RunSettings(threads=threads))
        if not examination.raised(NAME, label, other):
            agree(examination, NAME, label, other, f"with {label} the result is another, {APART}")
