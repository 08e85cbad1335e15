"""Impossible: why a candidate's results or times cannot be true."""

from __future__ import annotations


class Impossible(Exception):
    """A time below the floor, or a wrong result in a timed call: `reason` is the trick, the text the evidence."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason
