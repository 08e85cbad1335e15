"""Inclusive ranges of indices: from single indices, joined, and as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[int, int]


def of_indices(indices: Iterable[int]) -> list[Span]:
    return joined((i, i) for i in indices)


def joined(spans: Iterable[Span]) -> list[Span]:
    """The ranges in order; neighbours become one."""
    out: list[Span] = []
    for lo, hi in sorted(spans):
        if out and lo == out[-1][1] + 1:
            lo = out.pop()[0]
        out.append((lo, hi))
    return out


def say(spans: Sequence[Span], most: int = 4) -> str:
    """3, 8..12 and 4 more"""
    text = ", ".join(str(lo) if lo == hi else f"{lo}..{hi}" for lo, hi in spans[:most])
    return text + (f" and {len(spans) - most} more" if len(spans) > most else "")
