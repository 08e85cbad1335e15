"""Repeats, and one with another number of threads: bit-equal, or within the noise of legal summation orders.

Three repeats of the same inputs are enough to be looked at. On a CPU those that the second call makes count among them;
on a GPU, where races show by chance, three more are made.
"""

from __future__ import annotations

import torch

from ..execute.run import RunSettings
from ..judge.examination import Session
from .second_call import agree

NAME = "repeats"
COUNT = 3
APART = "farther apart than legal orders of the golden lie"
WIDER = f"a repeat with the same inputs gives another result, {APART}"


def run(session: Session) -> None:
    on_cpu = session.material.device.type == "cpu"
    for i in range(COUNT - session.repeated if on_cpu else COUNT):
        label = f"repeat {i + 1}"
        again = session.execute(NAME, label)
        if session.raised(NAME, label, again) or not agree(session, NAME, label, again, WIDER):
            return
    if on_cpu:
        threads = 1 if torch.get_num_threads() > 1 else 2
        label = f"{threads} thread{'s' * (threads > 1)}"
        other = session.execute(NAME, label, RunSettings(threads=threads))
        if not session.raised(NAME, label, other):
            agree(session, NAME, label, other, f"with {label} the result is another, {APART}")
