"""Variables of a C++ function: their types as written, and where each is in scope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .statements import Statement
from .tokens import KEYWORDS, CppFunction, Token, pieces

_TYPE_SIGNS = ("*", "&", "::", "<", ">", ",", ">>")
_WHOLE = frozenset(("", "unsigned", "int", "long", "long long", "size_t", "int32_t", "int64_t", "uint32_t", "uint64_t"))
_LEFT_OUT = ("const", "static", "constexpr", "inline", "restrict", "__restrict", "__restrict__", "&", "std", "::")


@dataclass(frozen=True)
class Variable:
    """type: as it is written, "" if unknown; first, last: tokens between which it is in scope."""

    name: str
    type: str
    first: int
    last: int
    declared: int = -1

    @property
    def whole(self) -> bool:
        return self.type.removeprefix("unsigned ") in _WHOLE

    def sees(self, at: int) -> bool:
        return self.first <= at <= self.last


def variables(tokens: Sequence[Token], function: CppFunction, heads: Sequence[Statement]) -> list[Variable]:
    """The arguments and what statements and loops declare."""
    opening = function.name_at + 1
    out = []
    for piece in pieces(tokens, opening + 1, tokens[opening].pair):
        names = [n for n, t in enumerate(piece) if t.kind == "name" and t.text not in KEYWORDS]
        if names:
            type_ = type_text(piece[: names[-1]]) + "*" * (piece[-1].text == "]")
            out.append(Variable(piece[names[-1]].text, type_, function.first, function.last))
    for statement in heads:
        begin = statement.first + 2 if statement.head else statement.first
        declared = _declared(tokens, begin)
        if declared is None:
            continue
        last = statement.last if statement.head else _block_end(tokens, function, begin)
        type_ = type_text(tokens[begin:declared]) + "*" * (tokens[declared + 1].text == "[")
        out.append(Variable(tokens[declared].text, type_, declared + 1, last, declared))
    return out


def type_text(tokens: Sequence[Token]) -> str:
    words = [t.text for t in tokens if t.text not in _LEFT_OUT]
    text = " ".join(words).replace(" *", "*")
    return "" if text == "auto" else text


def _declared(tokens: Sequence[Token], begin: int) -> int | None:
    """The name that a statement declares which begins at a token."""
    i = begin
    while i < len(tokens) and (tokens[i].kind == "name" or tokens[i].text in _TYPE_SIGNS):
        i += 1
    at = i - 1
    plain = at > begin and tokens[at].kind == "name" and tokens[at].text not in KEYWORDS
    return at if plain and tokens[begin].kind == "name" and tokens[begin].text not in ("return", "delete") else None


def _block_end(tokens: Sequence[Token], function: CppFunction, at: int) -> int:
    """The end of the block around a token."""
    ends = [t.pair for n, t in enumerate(tokens[function.first : at], function.first) if t.text == "{" and t.pair > at]
    return min(ends, default=function.last)
