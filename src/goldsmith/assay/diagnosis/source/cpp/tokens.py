"""Tokens of C++ text, and the functions among them: as much as edits need, where a compiler refuses what is none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

_PATTERN = re.compile(
    r"""(?P<skipped>\s+|//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:[^\n\\]|\\.)*)
    |(?P<word>R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<number>(?:0[xX][0-9a-fA-F']+|(?:\d[\d']*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)[uUlLfFzZ]*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<sign><<=|>>=|<=>|->\*|\.\.\.|::|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_NO_FUNCTIONS = frozenset("if for while switch catch return sizeof alignas decltype __attribute__".split())
_AFTER = frozenset("const noexcept override final mutable".split())  # between the arguments of a function and its body
KEYWORDS = frozenset(
    "alignas auto bool break case char class const const_cast constexpr continue default delete do double else enum "
    "extern false float for friend goto if inline int int32_t int64_t long mutable namespace new noexcept nullptr "
    "operator private protected public register reinterpret_cast return short signed size_t sizeof static static_cast "
    "std struct switch template this throw true try typedef typename uint32_t uint64_t unsigned using void volatile "
    "while restrict __restrict __restrict__ ptrdiff_t uint8_t int8_t uint16_t int16_t".split()
)


@dataclass(frozen=True)
class Token:
    """kind: "name", "number", "word" (a string) or "sign". start, end: bytes; pair: index of a bracket's other one."""

    kind: str
    text: str
    start: int
    end: int
    pair: int = -1


@dataclass(frozen=True)
class CppFunction:
    """A function that is defined in a file.

    begin, body, end  bytes: its first one, that behind the brace which opens the body, and that behind the last one
    first, last       the tokens of its body, by index, the last one excluded
    arguments         names of its arguments and, in `templates`, of those of its template; None if one has no name
    """

    name: str
    begin: int
    body: int
    end: int
    first: int
    last: int
    name_at: int
    arguments: tuple[str, ...] | None
    templates: tuple[str, ...] | None
    constant: bool


@dataclass(frozen=True)
class CppText:
    """The text of a file, in which a character is a byte."""

    text: str

    @cached_property
    def tokens(self) -> list[Token]:
        rows: list[Token] = []
        for match in _PATTERN.finditer(self.text):
            kind = match.lastgroup or "sign"
            if match["skipped"] is None:
                kind = "word" if match["word"] is not None else kind
                rows.append(Token(kind, match[0], match.start(), match.end()))
        return _paired(rows)

    @cached_property
    def functions(self) -> list[CppFunction]:
        return list(_functions(self.tokens))

    def line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1


def _paired(tokens: list[Token]) -> list[Token]:
    """The same tokens, in which brackets know each other."""
    opened: list[int] = []
    pairs: dict[int, int] = {}
    for i, token in enumerate(tokens):
        if token.kind == "sign" and token.text in _CLOSING:
            opened.append(i)
        elif token.kind == "sign" and token.text in _CLOSING.values():
            while opened and _CLOSING[tokens[opened[-1]].text] != token.text:
                opened.pop()
            if opened:
                pairs[opened[-1]] = i
                pairs[i] = opened.pop()
    return [Token(t.kind, t.text, t.start, t.end, pairs.get(i, -1)) for i, t in enumerate(tokens)]


def _functions(tokens: Sequence[Token]) -> Iterator[CppFunction]:
    i = begin = 0
    while i < len(tokens):
        token = tokens[i]
        if token.text == "{" and token.kind == "sign":
            opening = _arguments_before(tokens, i, begin)
            if opening is not None and token.pair > 0:
                yield _function(tokens, begin, opening, i)
                i = token.pair
            elif begin < i and tokens[i - 1].text == "=" and token.pair > 0:  # values of a constant
                i = token.pair
        if tokens[i].kind == "sign" and tokens[i].text in ("{", "}", ";"):
            begin = i + 1
        i += 1


def _arguments_before(tokens: Sequence[Token], brace: int, begin: int) -> int | None:
    """The parenthesis that opens the arguments of the function whose body begins at `brace`."""
    i = brace - 1
    while i > begin and (tokens[i].text in _AFTER):
        i -= 1
    for arrow in range(i, begin, -1):  # a type behind the arguments
        if tokens[arrow].text == "->" and tokens[arrow - 1].text == ")":
            i = arrow - 1
    opening = tokens[i].pair if i >= begin and tokens[i].text == ")" else -1
    named = opening > begin and tokens[opening - 1].kind == "name" and tokens[opening - 1].text not in _NO_FUNCTIONS
    return opening if named else None


def _function(tokens: Sequence[Token], begin: int, opening: int, brace: int) -> CppFunction:
    head = [t.text for t in tokens[begin:opening]]
    closing = tokens[opening].pair
    templates: tuple[str, ...] | None = ()
    if head[:2] == ["template", "<"]:
        depth, end = 0, begin + 1
        while end < opening:
            depth += {"<": 1, ">": -1, ">>": -2}.get(tokens[end].text, 0)
            if depth <= 0:
                break
            end += 1
        templates = names_of(tokens, begin + 2, end)
    outside = opening >= begin + 2 and tokens[opening - 2].text in ("::", "~")
    arguments = None if outside else names_of(tokens, opening + 1, closing)
    last = tokens[brace].pair
    return CppFunction(
        tokens[opening - 1].text, tokens[begin].start, tokens[brace].end, tokens[last].end, brace + 1, last,
        opening - 1, arguments, templates, bool({"constexpr", "consteval"} & set(head)),
    )  # fmt: skip


def names_of(tokens: Sequence[Token], first: int, last: int) -> tuple[str, ...] | None:
    """The names that a list of arguments declares; None if one of them has none."""
    rows: list[str] = []
    for piece in pieces(tokens, first, last):
        declared = [t for t in piece if t.kind == "name"]
        texts = [t.text for t in piece]
        if texts == ["void"]:
            continue
        stop = next((i for i, t in enumerate(texts) if t in ("=", "[")), len(texts))
        declared = [t for t in piece[:stop] if t.kind == "name"]
        if len(declared) < 2 or piece[stop - 1].kind != "name" or piece[stop - 1].text in KEYWORDS or "..." in texts:
            return None
        rows.append(declared[-1].text)
    return tuple(rows)


def pieces(tokens: Sequence[Token], first: int, last: int) -> list[Sequence[Token]]:
    """The tokens between commas; those within brackets, also angle brackets, belong together."""
    rows: list[Sequence[Token]] = []
    begin, angle, i = first, 0, first
    while i < last:
        token = tokens[i]
        if token.text in _CLOSING and token.pair > i:
            i = token.pair
        angle += {"<": 1, ">": -1, ">>": -2}.get(token.text, 0)
        if token.text == "," and not angle:
            rows.append(tokens[begin:i])
            begin = i + 1
        i += 1
    return [*rows, tokens[begin:last]] if begin < last else rows
