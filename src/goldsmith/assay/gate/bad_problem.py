"""BadProblem: a problem that cannot be judged by."""

from __future__ import annotations


class BadProblem(ValueError):
    """A problem that cannot be read or has no cases; the text says what is wrong, where, and what to do."""
