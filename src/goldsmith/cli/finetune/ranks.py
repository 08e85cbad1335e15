"""One of several processes that torchrun started: it shows nothing unless it is the first, and no rank ends alone."""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console

from ..terminal import USAGE, Failure, print_paragraph
from .display import FinetuneDisplay

if TYPE_CHECKING:
    from ...hf.training.ranks.group import Ranks

FAILED = 1  # exit status after an error that is not the user's
LINGER_S = 3.0  # rank 0 may hold the store from which the others read its message


def silent_display() -> FinetuneDisplay:
    return FinetuneDisplay(Console(file=io.StringIO(), quiet=True), Console(file=io.StringIO(), quiet=True))


def on_ranks(ranks: Ranks, work: Callable[[], int]) -> int:
    """Runs `work` on this rank and returns its exit status; if it fails on one, all processes end with a message.

    The failing rank prints its own message, and the others print it with the rank's number. A message that all ranks
    have, such as one about the options, is printed once.
    """
    from ...hf.training.ranks.group import RankLost

    name = f"Rank {ranks.rank} of {ranks.world}"
    ranks.presence.abandon.append(lambda notice: print_paragraph(f"{name} ends: {notice}"))
    lingers = ranks.hosts_store
    try:
        status = work()
        ranks.finish()
        return status
    except RankLost as lost:  # at the very end
        status, lingers = _report(f"{name} ends: {lost}", USAGE), False
    except Failure as problem:
        if isinstance(problem.__cause__, RankLost):
            status, lingers = _report(f"{name} ends: {problem}", USAGE), False
        elif ranks.leave(f"ended: {problem}"):
            status = _report(f"{name}: {problem}", problem.status)
        else:
            status = problem.status
    except BaseException as error:  # noqa: BLE001  the others must not wait for this rank
        ranks.leave(f"ended: {type(error).__name__}: {error}")
        traceback.print_exc()
        status = _report(f"{name}: {type(error).__name__}: {error}", FAILED)
    if lingers:
        time.sleep(LINGER_S)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)  # ending the process group would wait for ranks that are gone


def _report(text: str, status: int) -> int:
    print_paragraph(text)
    return status
