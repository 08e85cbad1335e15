"""Turns at a device that several processes share: many at once, or one alone, such as a test that times."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Waits until no other process has the device alone, or, `alone`, until no other process has it at all.

    Everybody passes the door, and who wants the device alone waits in it; otherwise the others, whose turns overlap,
    would never let it be free.
    """
    with (folder / "card.door").open("a") as door, (folder / "card").open("a") as card:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(card, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
