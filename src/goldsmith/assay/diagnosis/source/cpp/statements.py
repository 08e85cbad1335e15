"""Statements of a C++ function, as ranges of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .tokens import Token

_HEADS = ("if", "for", "while", "switch")


@dataclass(frozen=True)
class Statement:
    """Tokens from `first` to `last`. head: a loop or a condition; block: the brace that opens its body, if any."""

    first: int
    last: int
    head: bool = False
    block: int | None = None

    def around(self, other: Statement) -> bool:
        """Whether it is a loop or a condition with the other one in its body."""
        return self.head and self.block is not None and self.block < other.first and other.last < self.last


def statements(tokens: Sequence[Token], first: int, last: int) -> list[Statement]:
    """The statements of a body and of all blocks in it, in order."""
    rows: list[Statement] = []
    i = first
    while i < last:
        text = tokens[i].text
        if text in ("{", "}", ";", "else", "do", "try"):
            i += 1
        elif text in _HEADS:
            opening = i + 1 + (tokens[i + 1].text == "constexpr")
            closing = max(tokens[opening].pair, opening)
            block = closing + 1 if closing + 1 < last and tokens[closing + 1].text == "{" else None
            end = tokens[block].pair if block is not None else closing
            rows.append(Statement(i, max(end, closing), True, block))
            i = closing + 1
        else:
            end = _end(tokens, i, last)
            rows.append(Statement(i, end))
            i = end + 1
    return rows


def _end(tokens: Sequence[Token], i: int, last: int) -> int:
    """The semicolon of a statement; braces and parentheses within it belong to it."""
    while i < last - 1 and tokens[i].text != ";":
        i = tokens[i].pair + 1 if tokens[i].pair > i else i + 1
    return min(i, last - 1)
