"""CppEdits: single edits of C++ functions, made of tokens. The compiler refuses those that are no C++."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ..edits.edits import Edit, Line, Place, Span, cheapest_first
from .statements import Statement, statements
from .tokens import KEYWORDS, CppFunction, CppText, Token
from .variables import Variable, variables

_OTHER_PHASE = 1.5  # cost of an edit where only the right phase can see it
_COMPARATORS = {"<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="), "==": ("!=",), "!=": ("==",)}
_OPERATORS = {"+": "-*", "-": "+*", "*": "/+", "/": "*", "%": "/"}
_ASSIGNMENTS = {"+=": ("=", "-="), "-=": ("+=", "="), "*=": ("=", "/=", "+="), "/=": ("*=",), "=": ("+=",)}
_TWINS = (
    ("exp", "exp2", "expm1"), ("expf", "exp2f", "expm1f"), ("log", "log2", "log1p"), ("logf", "log2f", "log1pf"),
    ("max", "min"), ("fmax", "fmin"), ("fmaxf", "fminf"), ("sin", "cos"), ("sinf", "cosf"), ("floor", "ceil"),
    ("sqrt", "cbrt"), ("fabs", "sqrt"), ("tanh", "tan"), ("float", "double"), ("int", "long long"),
    ("int32_t", "int64_t"),
)  # fmt: skip
_DTYPES = frozenset(("float", "double", "int", "long long", "int32_t", "int64_t"))
_BACKWARDS = ("bwd", "backward", "grad")
_CLOSERS = (")", "]")


class CppEdits:
    """Every single edit of the functions of some files; the interface of `EveryEdit`."""

    def __init__(self, files: Mapping[str, bytes], wrong: Collection[str]):
        """wrong: names of the wrong results."""
        texts = {path: CppText(data.decode("latin-1")) for path, data in files.items()}
        named = [(path, text, f) for path, text in texts.items() for f in text.functions]
        backward = {f.name for _, _, f in named if any(word in f.name.lower() for word in _BACKWARDS)}
        gradients = bool(wrong) and all(n.endswith(".grad") for n in wrong)
        apart = bool(backward) and len(backward) < len(named)
        self.functions = [
            _Function(path, text, f, _OTHER_PHASE * (apart and (f.name in backward) != gradients))
            for path, text, f in named
        ]
        self.near = cheapest_first(e for f in self.functions for e in f.near())
        self.done: set[Place] = set()

    def far(self, places: Collection[Place] | None = None) -> list[Edit]:
        """Edits that bring in other names of the function, in these places, or in all others; each only once."""
        edits = []
        for function in self.functions:
            own = {p for p in function.places if places is None or p in places} - self.done
            self.done |= own
            edits += [e for e in function.far() if (e.path, e.place) in own] if own else []
        return cheapest_first(edits)

    branches: set[Place] = set()  # a trace sees no operations of C++

    def around(self, lines: Collection[Line]) -> set[Place]:
        return set()

    def reading(self, words: Collection[str]) -> set[Place]:
        return set()

    def places(self, lines: Collection[tuple[str, int]]) -> set[Place]:
        return {place for f in self.functions for place in f.places if place in lines}


@dataclass
class _Function:
    path: str
    text: CppText
    function: CppFunction
    penalty: float

    def __post_init__(self) -> None:
        self.tokens = self.text.tokens
        self.inside = range(self.function.first, self.function.last)
        self.statements: list[Statement] = statements(self.tokens, self.function.first, self.function.last)
        self.starts = {i: s.first for s in self.statements for i in range(s.first, s.last + 1)}
        self.variables = variables(self.tokens, self.function, self.statements)
        declared = {v.declared for v in self.variables}
        self.values = [i for i in self.inside if self._is_value(i) and i not in declared]
        self.declared = declared

    @property
    def places(self) -> set[Place]:
        return {(self.path, self.text.line(self.tokens[s.first].start)) for s in self.statements}

    def near(self) -> Iterator[Edit]:
        for i in self.inside:
            token = self.tokens[i]
            if token.kind == "number":
                yield from self._numbers(i, token)
            elif token.kind == "name":
                yield from self._twins(i, token)
            elif token.kind == "sign":
                yield from self._signs(i, token)
        yield from self._names(others=False)
        yield from self._statements()

    def far(self) -> Iterator[Edit]:
        """Factors, addends and offsets of the function's names, and names for numbers."""
        for i in self.values:
            end = self._primary(i)
            at = self.tokens[end].end
            own = self._variable(i)
            if own is not None and "*" in own.type and end == i:  # a pointer alone
                continue
            for name in self._scalars(i):
                if name != self.tokens[i].text:
                    yield self._edit(i, "factor added", 2.0, (at, at, f" * {name}"))
                    yield self._edit(i, "factor added", 2.2, (at, at, f" / {name}"))
                    yield self._edit(i, "addend added", 2.3, (at, at, f" + {name}"))
                    yield self._edit(i, "addend added", 2.4, (at, at, f" - {name}"))
            yield self._edit(i, "sign", 1.7, (self.tokens[i].start, at, f"(-{self._span_text(i, end)})"))
            yield self._edit(i, "factor added", 2.3, (at, at, f" * {self._span_text(i, end)}"))
        for i in self.inside:
            if self.tokens[i].kind == "number":
                for name in self._scalars(i):
                    yield self._edit(i, "a name for a number", 2.6, self._whole(i, name))
        for i in self.values:
            own = self._variable(i)
            if own is None or "*" not in own.type:
                for number in ("0", "1"):
                    yield self._edit(i, "a number for a name", 2.2, self._whole(i, number))
            if own is not None and own.whole:
                for more in ("+ 1", "- 1"):
                    yield self._edit(i, "plus or minus one", 2.2, self._whole(i, f"({own.name} {more})"))
        yield from self._names(others=True)

    # edits of one token

    def _numbers(self, i: int, token: Token) -> Iterator[Edit]:
        digits = token.text.rstrip("uUlLfFzZ")
        if "x" in digits.lower() or "'" in digits:
            return
        suffix = token.text[len(digits) :]
        if digits.isdecimal():
            value = int(digits)
            for other in dict.fromkeys((value + 1, max(value - 1, 0))):
                if other != value and (other or self._text(i - 1) not in ("+", "-")):
                    yield self._edit(i, "number", 1.05, self._whole(i, f"{other}{suffix}"))
            return
        real = float(digits)
        for changed in dict.fromkeys((2 * real, real / 2, real + 1, 1.0, 0.0, -real)):
            if changed != real:
                text = f"{changed!r}{suffix}"
                yield self._edit(i, "number", 1.3, self._whole(i, text if changed >= 0 else f"({text})"))

    def _twins(self, i: int, token: Token) -> Iterator[Edit]:
        for group in _TWINS:
            for other in group if token.text in group else ():
                if other != token.text:
                    kind, cost = ("dtype", 1.7) if other in _DTYPES else ("function", 1.1)
                    yield self._edit(i, kind, cost, self._whole(i, other))
        following = i + 1
        if self._text(following) == "(" and token.text not in KEYWORDS and self.tokens[following].pair > 0:
            begin = i
            while self._text(begin - 1) == "::":
                begin -= 2
            start, end = self.tokens[begin].start, self.tokens[following].start
            yield self._edit(i, "call removed", 1.4, (start, end, ""))

    def _signs(self, i: int, token: Token) -> Iterator[Edit]:
        sign, binary = token.text, self._ends_value(i - 1)
        for n, other in enumerate(_COMPARATORS.get(sign, ())):
            yield self._edit(i, "comparator", 1.0 + 0.4 * n, self._whole(i, other))
        if sign in _COMPARATORS and binary:
            yield from self._bounds(i)
        for n, other in enumerate(() if i - 1 in self.declared else _ASSIGNMENTS.get(sign, ())):
            yield self._edit(i, "assignment", 1.0 + 0.3 * n, self._whole(i, other))
        if sign in _OPERATORS and binary:
            for other in _OPERATORS[sign]:
                turned = {sign, other} == {"+", "-"}
                yield self._edit(i, "sign" if turned else "operator", 1.0 if turned else 1.4, self._whole(i, other))
            yield from self._removed(i, "factor removed" if sign in "*/%" else "addend removed")
        elif sign == "-" and not binary:
            yield self._edit(i, "a sign removed", 1.0, self._whole(i, ""))
        elif sign in ("&&", "||"):
            yield self._edit(i, "connective", 1.0, self._whole(i, "||" if sign == "&&" else "&&"))
            yield from self._removed(i, "condition removed")
        elif sign == "!":
            yield self._edit(i, "condition", 1.2, self._whole(i, ""))
        elif sign == "[" and token.pair > i + 1:
            at = self.tokens[token.pair].start
            for more in (" + 1", " - 1"):
                yield self._edit(i, "plus or minus one", 1.6, (at, at, more))
        elif sign == "?":
            yield from self._branches(i)

    def _bounds(self, i: int) -> Iterator[Edit]:
        at = self.tokens[self._operand_end(i + 1)].end
        for more in (" + 1", " - 1"):
            yield self._edit(i, "loop bounds", 1.4, (at, at, more))

    def _removed(self, i: int, kind: str) -> Iterator[Edit]:
        """The operator without its right operand, and without its left one."""
        right = self._primary_from(i + 1) if kind == "factor removed" else self._operand_end(i + 1)
        yield self._edit(i, kind, 0.95, (self.tokens[i - 1].end, self.tokens[right].end, ""))
        left = self._primary_before(i - 1)
        yield self._edit(i, kind, 1.1, (self.tokens[left].start, self.tokens[i + 1].start, ""))

    def _branches(self, i: int) -> Iterator[Edit]:
        colon = next((j for j in self._level(i + 1) if self._text(j) == ":"), None)
        if colon is not None:
            end = self._operand_end(colon + 1)
            first = self.text.text[self.tokens[i].end : self.tokens[colon].start].strip()
            second = self.text.text[self.tokens[colon].end : self.tokens[end].end].strip()
            spans = (self.tokens[i].end, self.tokens[end].end, f" {second} : {first}")
            yield self._edit(i, "condition", 1.3, spans)

    # names

    def _names(self, *, others: bool) -> Iterator[Edit]:
        """Another variable in scope, of the same type or, with `others`, of another one."""
        for i in self.values:
            own = self._variable(i)
            loop = self._in_head(i)
            for variable in self.variables:
                if own is None or variable.name == own.name or not variable.sees(i):
                    continue
                pointers = "*" in own.type, "*" in variable.type
                if pointers[0] == pointers[1] and (own.type != variable.type) == others:
                    cost = 2.5 if others else 1.5 + 0.8 * loop
                    yield self._edit(i, "another name", cost, self._whole(i, variable.name))

    def _variable(self, i: int) -> Variable | None:
        """The variable that a token names."""
        named = [v for v in self.variables if v.name == self.tokens[i].text and v.sees(i)]
        return named[-1] if named else None

    def _scalars(self, i: int) -> list[str]:
        return list(dict.fromkeys(v.name for v in self.variables if v.sees(i) and "*" not in v.type))

    def _in_head(self, i: int) -> bool:
        """Whether a token is in the head of a loop or a condition, where a wrong name may never end."""
        at = self.starts.get(i, i)
        return self._text(at) in ("for", "while") and i < self.tokens[at + 1].pair

    # statements

    def _statements(self) -> Iterator[Edit]:
        for n, statement in enumerate(self.statements):
            first, last = self.tokens[statement.first], self.tokens[statement.last]
            if statement.head:
                opening = statement.first + 1
                if first.text in ("if", "while") and self._text(opening) == "(":
                    inner = self.tokens[opening].end, self.tokens[self.tokens[opening].pair].start
                    text = self.text.text[slice(*inner)]
                    yield self._edit(statement.first, "condition", 1.3, (*inner, f"!({text})"))
                    yield self._edit(statement.first, "condition", 1.5, (*inner, "true"))
                continue
            yield self._edit(statement.first, "statement removed", 1.6, (first.start, last.end, ";"))
            following = self.statements[n + 1] if n + 1 < len(self.statements) else None
            if following is not None and not following.head and following.first == statement.last + 1:
                start, end = self.tokens[following.first].start, self.tokens[following.last].end
                own, next_one = self.text.text[first.start : last.end], self.text.text[start:end]
                spans = (first.start, last.end, next_one), (start, end, own)
                yield self._edit(statement.first, "statements exchanged", 1.9, *spans)
            loop = next((s for s in reversed(self.statements[:n]) if s.around(statement)), None)
            if loop is not None and statement.first < loop.last:  # the last one before leaves the loop as well
                text = self.text.text[first.start : last.end]
                at, behind = self.tokens[loop.first].start, self.tokens[loop.last].end
                removed = (first.start, last.end, "")
                yield self._edit(statement.first, "moved out of the loop", 2.0, (at, at, f"{text} "), removed)
                yield self._edit(statement.first, "moved out of the loop", 2.1, removed, (behind, behind, f" {text}"))
            if following is not None and following.head and following.block is not None:
                at = self.tokens[following.block].end
                text = self.text.text[first.start : last.end]
                spans = (first.start, last.end, ""), (at, at, f" {text}")
                yield self._edit(statement.first, "moved into the loop", 1.9, *spans)

    # tokens

    def _text(self, i: int) -> str:
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def _whole(self, i: int, text: str) -> Span:
        return self.tokens[i].start, self.tokens[i].end, text

    def _span_text(self, first: int, last: int) -> str:
        return self.text.text[self.tokens[first].start : self.tokens[last].end]

    def _is_value(self, i: int) -> bool:
        """Whether a token names a variable."""
        token, before, after = self.tokens[i], self._text(i - 1), self._text(i + 1)
        plain = token.kind == "name" and token.text not in KEYWORDS and before not in (".", "->", "::")
        if not plain or after in ("(", "::", "++", "--") or before in ("++", "--"):
            return False
        return not (self.tokens[i + 1].kind == "name" and after not in KEYWORDS)  # a type before what it declares

    def _ends_value(self, i: int) -> bool:
        token = self.tokens[i]
        named = token.kind == "name" and token.text not in KEYWORDS or token.text in ("this", "true", "false")
        return named or token.kind == "number" or token.kind == "sign" and token.text in _CLOSERS

    def _primary(self, i: int) -> int:
        """The last token of the expression that begins with a name, with its indices, calls and members."""
        while True:
            after = self._text(i + 1)
            if after in ("[", "(") and self.tokens[i + 1].pair > i:
                i = self.tokens[i + 1].pair
            elif after in (".", "->", "::"):
                i += 2
            else:
                return i

    def _primary_from(self, i: int) -> int:
        while self._text(i) in ("-", "+", "!", "*", "&") and i + 1 < self.function.last:
            i += 1
        if self._text(i) == "(" and self.tokens[i].pair > i:
            end = self.tokens[i].pair
            cast = self.tokens[end + 1].kind in ("name", "number") or self._text(end + 1) == "("
            return self._primary_from(end + 1) if cast else self._primary(end)
        return self._primary(i)

    def _primary_before(self, i: int) -> int:
        """The first token of the expression that ends with this one."""
        while True:
            if self._text(i) in _CLOSERS and 0 <= self.tokens[i].pair < i:
                i = self.tokens[i].pair
                if not (self._ends_value(i - 1) and self._text(i - 1) not in KEYWORDS):
                    return i
                i -= 1
            elif self._text(i - 1) in (".", "->", "::"):
                i -= 2
            else:
                return i

    def _level(self, i: int) -> Iterator[int]:
        """The tokens from here to the end of what brackets enclose."""
        while i < self.function.last and self._text(i) not in (")", "]", "}", ";"):
            yield i
            pair = self.tokens[i].pair
            i = pair + 1 if pair > i else i + 1

    def _operand_end(self, i: int) -> int:
        """The last token of a sum's operand, or of a comparison's, that begins here."""
        end = i
        for j in self._level(i):
            ends = self._text(j) in ("+", "-") and self._ends_value(j - 1) and j > i
            if ends or self._text(j) in (",", "?", ":", "&&", "||", *_COMPARATORS, *_ASSIGNMENTS):
                break
            pair = self.tokens[j].pair
            end = pair if pair > j else j
        return end

    def _edit(self, i: int, kind: str, cost: float, *spans: Span) -> Edit:
        line = self.text.line(self.tokens[i].start)
        place = self.text.line(self.tokens[self.starts.get(i, i)].start)
        return Edit(self.path, spans, kind, cost + self.penalty, line, place, self.function.name)
