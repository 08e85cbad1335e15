"""Span: a part of an axis by a rule that holds for every length, such as "without the last block of 8"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

SMALL = (4, 2, 3)
BLOCKS = (8, 16, 32, 64, 128, 256)
_RULES: dict[str, tuple[Callable[[int, int], tuple[int, int]], str]] = {
    # ends
    "one short": (lambda n, b: (0, n - 1), "one short"),
    "whole blocks": (lambda n, b: (0, n - n % b), "the last part of a block of {} is left out"),
    "first block": (lambda n, b: (0, b), "the first block of {} alone"),
    "one block short": (lambda n, b: (0, n - b), "one block of {} short"),
    "without last block": (lambda n, b: (0, (n - 1) // b * b), "the last block of {} is left out"),
    "first half": (lambda n, b: (0, n // 2), "the first half alone"),
    # beginnings
    "without first": (lambda n, b: (1, n), "from the second on"),
    "last block": (lambda n, b: ((n - 1) // b * b, n), "the last block of {} alone"),
    "without first block": (lambda n, b: (b, n), "without the first block of {}"),
    "second half": (lambda n, b: (n // 2, n), "the second half alone"),
    "last": (lambda n, b: (n - 1, n), "the last one alone"),
}


@dataclass(frozen=True)
class Span:
    """The part of an axis that is left."""

    rule: str
    block: int = 0

    def of(self, n: int) -> tuple[int, int]:
        lo, hi = _RULES[self.rule][0](n, self.block)
        return max(0, min(lo, n)), max(0, min(hi, n))

    @property
    def text(self) -> str:
        return _RULES[self.rule][1].format(self.block)


def _rules() -> Iterator[Span]:
    yield Span("one short")
    for block in BLOCKS:
        for rule in ("whole blocks", "first block", "one block short", "without last block"):
            yield Span(rule, block)
    yield from (Span("without last block", block) for block in SMALL)
    yield Span("first half")
    yield Span("without first")
    for block in BLOCKS:
        yield from (Span("last block", block), Span("without first block", block))
    yield from (Span(rule, block) for rule in ("last block", "first block") for block in SMALL)
    yield from (Span("second half"), Span("last"))


_ALL = tuple(_rules())


def cuts(n: int) -> list[Span]:
    """The rules under which a loop over n covers a part of it, one for each part."""
    spans: dict[tuple[int, int], Span] = {}
    for span in _ALL:
        lo, hi = span.of(n)
        if 0 <= lo < hi <= n and hi - lo < n and not (lo and hi < n):
            spans.setdefault((lo, hi), span)
    return list(spans.values())
