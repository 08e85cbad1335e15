"""Three repeats, and one with another number of threads: bit-equal, or within the noise of legal summation orders."""

from __future__ import annotations

import torch

from ..run import How
from ..session import Session
from .second_call import agree

NAME = "repeats"
COUNT = 3


def run(session: Session) -> None:
    for i in range(COUNT):
        again = session.execute(NAME, f"repeat {i + 1}")
        if session.raised(NAME, f"repeat {i + 1}", again):
            return
        if not agree(
            session,
            NAME,
            f"repeat {i + 1}",
            again,
            "a repeat with the same inputs gives another result, wider than any legal order",
        ):
            return
    if session.material.device.type == "cpu":
        threads = 1 if torch.get_num_threads() > 1 else 2
        label = f"{threads} thread{'s' * (threads > 1)}"
        other = session.execute(NAME, label, How(threads=threads))
        if not session.raised(NAME, label, other):
            agree(session, NAME, label, other, f"with {label} the result is another, wider than any legal order")
