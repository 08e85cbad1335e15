"""Edits that need only the node they change: comparators, operators, numbers, operands, calls, statements."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .edits import Edit, Function, loads

_COMPARATORS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_OPERATORS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.MatMult: "@",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>", ast.Pow: "**",
}  # fmt: skip
_ALIKE = (  # operators that are taken for one another, with the cost; a sign costs less
    (1.4, ("+", "-")), (1.4, ("*", "/", "//", "%")), (1.4, ("&", "|", "^")), (1.4, ("<<", ">>")), (1.4, ("+", "*")),
    (1.4, ("**", "*")), (1.9, ("+", "-", "*", "/")), (1.9, ("@", "*")),
)  # fmt: skip
_TWINS = (
    ("maximum", "minimum"), ("max", "min", "sum"), ("amax", "amin"), ("sum", "mean"), ("zeros", "empty", "ones"),
    ("zeros_like", "empty_like", "ones_like"), ("new_zeros", "new_empty", "new_ones"), ("exp", "exp2", "expm1"),
    ("log", "log2", "log1p"), ("sin", "cos"), ("floor", "ceil", "round", "trunc"), ("sqrt", "rsqrt"),
    ("triu", "tril"), ("argmax", "argmin"), ("cumsum", "cumprod"), ("var", "std"), ("atomic_add", "store"),
    ("atomic_max", "atomic_min"), ("repeat", "repeat_interleave"), ("reshape", "view"), ("gather", "take_along_dim"),
    ("square", "abs"), ("softmax", "log_softmax"), ("rand", "randn"), ("cdiv", "floordiv"), ("unsqueeze", "squeeze"),
    ("scatter", "scatter_add"), ("index_add_", "index_copy_"), ("logical_and", "logical_or"),
    ("clamp_min", "clamp_max"),
)  # fmt: skip
_WORDS = {"left": "right", "right": "left", "ieee": "tf32", "tf32": "ieee", "mean": "sum", "sum": "mean"}


def small_edits(function: Function) -> Iterator[Edit]:
    for node in loads(function):
        if isinstance(node, ast.Compare):
            yield from _comparators(function, node)
        elif isinstance(node, ast.BinOp):
            yield from _operators(function, node)
        elif isinstance(node, ast.BoolOp):
            yield from _connectives(function, node)
        elif isinstance(node, ast.UnaryOp):
            if isinstance(node.op, ast.USub | ast.Not) and not isinstance(node.operand, ast.Constant):
                yield function.swap(node, function.file.text(node.operand), "a sign removed", 1.0)
        elif isinstance(node, ast.Constant):
            yield from _constants(function, node)
        elif isinstance(node, ast.IfExp):
            for branch in (node.body, node.orelse):
                yield function.swap(node, function.file.text(branch), "one branch taken", 1.2)
        elif isinstance(node, ast.Call):
            yield from _calls(function, node)
        elif isinstance(node, ast.Attribute):
            yield from _attributes(function, node)
        elif isinstance(node, ast.Subscript) and _is_number(node.slice):
            yield function.swap(node, f"{function.file.text(node.value)}.sum(0)", "a sum for an entry", 1.4)
    for other in function.nodes:
        if isinstance(other, ast.Slice):
            yield from _slices(function, other)
        elif isinstance(other, ast.stmt):
            yield from _statements(function, other)


def _between(function: Function, left: ast.AST, right: ast.AST) -> tuple[int, int, str]:
    """The bytes between two nodes."""
    start, end = function.file.span(left)[1], function.file.span(right)[0]
    return start, end, function.file.data[start:end].decode()


def _comparators(function: Function, node: ast.Compare) -> Iterator[Edit]:
    for left, right, op in zip([node.left, *node.comparators], node.comparators, node.ops, strict=False):
        known = _COMPARATORS.get(type(op))
        start, _, gap = _between(function, left, right)
        if known is None or gap.count(known) != 1:
            continue
        at = start + len(gap[: gap.index(known)].encode())
        for other in _COMPARATORS.values():
            if other != known:
                near = other.rstrip("=") == known.rstrip("=")
                yield function.edit(node, "comparator", 1.0 if near else 1.4, (at, at + len(known), other))


def _operators(function: Function, node: ast.BinOp) -> Iterator[Edit]:
    known = _OPERATORS[type(node.op)]
    start, end, gap = _between(function, node.left, node.right)
    match = re.fullmatch(r"([\s)\\]*)" + re.escape(known) + r"([\s(\\]*)", gap)
    if match is None:
        return
    at = start + len(match.group(1))
    others = {o: cost for cost, group in reversed(_ALIKE) if known in group for o in group if o != known}
    for other, cost in others.items():
        kind = "sign" if {known, other} == {"+", "-"} else "operator"
        yield function.edit(node, kind, 1.0 if kind == "sign" else cost, (at, at + len(known), other))
    whole_start, whole_end = function.file.span(node)
    data = function.file.data
    left = data[whole_start : start + len(match.group(1).rstrip())].decode()
    right = data[end - len(match.group(2).lstrip()) : whole_end].decode()
    # the operator of the left operand binds as strongly as this one: a - b + c without "a -" is "b + c", not "-b + c"
    word = "factor" if known in ("*", "/", "//", "%", "@", "**") else "addend"
    yield function.swap(node, left, f"{word} removed", 0.9)
    yield function.swap(node, right, f"{word} removed", 0.95 if known != "-" else 1.3)
    if isinstance(node.left, ast.BinOp):
        yield function.swap(node, function.file.text(node.left.left), "terms removed", 1.45)
    if known == "-":
        yield function.swap(node, f"-{right}", "addend removed", 1.3)
    if known not in ("+", "*", "&", "|", "^"):
        wrapped = f"({left})" if isinstance(node.left, ast.BinOp) and not left.startswith("(") else left
        yield function.edit(node, "operands swapped", 1.2, (whole_start, whole_end, f"{right} {known} {wrapped}"))


def _is_number(node: ast.AST) -> bool:
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)


def _connectives(function: Function, node: ast.BoolOp) -> Iterator[Edit]:
    known, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    spans = []
    for left, right in zip(node.values, node.values[1:], strict=False):
        start, _, gap = _between(function, left, right)
        at = start + gap.index(known)
        spans.append((at, at + len(known), other))
    yield function.edit(node, "connective", 1.0, *spans)
    for value in node.values:
        if len(node.values) == 2:
            yield function.swap(node, function.file.text(value), "condition removed", 1.1)


def _constants(function: Function, node: ast.Constant) -> Iterator[Edit]:
    value = node.value
    parent = function.file.parents.get(node)
    if isinstance(parent, ast.Expr):
        return
    if isinstance(value, bool):
        yield function.swap(node, str(not value), "flag", 1.0)
    elif isinstance(value, int):
        negative = isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.USub)
        for near in (value + 1, value - 1):
            yield function.swap(node, str(near), "number", 1.05)
        if not negative and value:
            yield function.swap(node, f"-{value}", "number", 1.2)
        if negative and parent is not None:
            yield function.swap(parent, str(value), "number", 1.2)
            yield function.swap(parent, str(value - 1), "number", 1.2)
        for other in (0, 1, 2, value * 2, value // 2):
            yield function.swap(node, str(other), "number", 1.5)
    elif isinstance(value, float):
        for factor in (2.0, 0.5):
            yield function.swap(node, repr(value * factor), "number", 1.4)
        for number in ("0.0", "1.0", "2.0", "0.5", f"-{value!r}"):
            yield function.swap(node, number, "number", 1.2)
        for number in ('float("inf")', '-float("inf")', "1e-5", "1e-6", "1e-8"):
            yield function.swap(node, number, "number", 1.9)
    elif isinstance(value, str) and value in _WORDS:
        yield function.swap(node, f'"{_WORDS[value]}"', "word", 1.2)


def _calls(function: Function, node: ast.Call) -> Iterator[Edit]:
    file, arguments = function.file, node.args
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    for twin in dict.fromkeys(t for group in _TWINS if name in group for t in group if t != name):
        end = file.span(node.func)[1]
        yield function.edit(node, "function", 1.1, (end - len(name), end, twin))
    if name.endswith("_") and not name.endswith("__") and isinstance(node.func, ast.Attribute):
        end = file.span(node.func)[1]
        yield function.edit(node, "function", 1.1, (end - 1, end, ""))
    yield from _limits(function, node, name)
    yield from _repeats(function, node, name)
    if isinstance(node.func, ast.Attribute):
        inner = node.func.value
        if not (isinstance(inner, ast.Name) and inner.id in function.called):
            yield function.swap(node, file.text(inner), "call removed", 1.2)
    for argument in arguments if len(arguments) <= 2 and not node.keywords else ():
        if not isinstance(argument, ast.Starred):
            yield function.swap(node, file.text(argument), "call removed", 1.5)
    if name == "float" and arguments and isinstance(arguments[0], ast.Constant) and arguments[0].value == "inf":
        parent = file.parents.get(node)
        if isinstance(parent, ast.UnaryOp):
            yield function.swap(parent, "0.0", "number", 1.2)
        yield function.swap(node, "0.0", "number", 1.3)
    for i, first in enumerate(arguments):
        for second in arguments[i + 1 :]:
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                yield function.edit(
                    node, "arguments swapped", 1.6, (*file.span(first), file.text(second)),
                    (*file.span(second), file.text(first)),
                )  # fmt: skip
    parts = [*arguments, *node.keywords]
    for i, part in enumerate(parts):
        if i and (isinstance(part, ast.keyword) or i == len(arguments) - 1):
            yield function.edit(node, "argument removed", 1.6, (_end(function, parts[i - 1]), _end(function, part), ""))


def _limits(function: Function, node: ast.Call, name: str) -> Iterator[Edit]:
    """`minimum(maximum(x, -limit), limit)` for `minimum(x, limit)`: a range of which one end is missing."""
    if name in ("minimum", "maximum") and len(node.args) == 2 and isinstance(node.func, ast.Attribute):
        other = "maximum" if name == "minimum" else "minimum"
        base = function.file.text(node.func.value)
        for value, limit in (node.args, node.args[::-1]):
            if not isinstance(limit, ast.Name | ast.Constant | ast.UnaryOp):
                continue
            bound = limit.operand if isinstance(limit, ast.UnaryOp) else limit
            negative = f"-{function.file.text(limit)}" if bound is limit else function.file.text(bound)
            text = f"{base}.{other}({function.file.text(value)}, {negative})"
            yield function.swap(value, text, "limit added", 1.6)


def _repeats(function: Function, node: ast.Call, name: str) -> Iterator[Edit]:
    """Each element several times in a row for the whole several times."""
    file = function.file
    method = isinstance(node.func, ast.Attribute) and not any(isinstance(a, ast.Starred) for a in node.args)
    if name == "repeat" and method:
        counts = [(n, a) for n, a in enumerate(node.args) if not (isinstance(a, ast.Constant) and a.value == 1)]
        if len(counts) == 1 and len(node.args) > 1:
            axis, count = counts[0]
            text = f"{file.text(node.func.value)}.repeat_interleave({file.text(count)}, dim={axis})"  # type: ignore[attr-defined]
            yield function.swap(node, text, "function", 1.1)


def _end(function: Function, part: ast.AST) -> int:
    return function.file.span(part)[1]


def _attributes(function: Function, node: ast.Attribute) -> Iterator[Edit]:
    if node.attr in ("T", "mT"):
        yield function.swap(node, function.file.text(node.value), "transposition removed", 1.0)


def _slices(function: Function, node: ast.Slice) -> Iterator[Edit]:
    file = function.file
    for bound in (node.lower, node.upper):
        if bound is not None:
            span = file.span(bound)
            yield function.edit(bound, "bound removed", 1.3, (*span, ""))
            if not isinstance(bound, ast.Constant):
                for more in ("+ 1", "- 1"):
                    yield function.edit(bound, "bound moved", 1.2, (*span, f"{file.text(bound)} {more}"))
    if node.lower is not None and node.upper is None and file.span(node)[1] > file.span(node.lower)[1]:
        yield function.edit(node, "slice turned", 1.3, (*file.span(node), f":{file.text(node.lower)}"))
    if node.upper is not None and node.lower is None:
        yield function.edit(node, "slice turned", 1.3, (*file.span(node), f"{file.text(node.upper)}:"))
    yield from _other_end(function, node)


def _other_end(function: Function, node: ast.Slice) -> Iterator[Edit]:
    """As many from the other end: `-1:` for `:1`, `:-1` for `1:`."""
    only = node.lower if node.upper is None else node.upper if node.lower is None else None
    if only is not None and node.step is None and isinstance(only, ast.Name | ast.Constant | ast.UnaryOp):
        text = function.file.text(only)
        other = text[1:] if text.startswith("-") else f"-{text}"
        whole = f":{other}" if only is node.lower else f"{other}:"
        yield function.edit(node, "slice turned", 1.25, (*function.file.span(node), whole))


def _statements(function: Function, node: ast.stmt) -> Iterator[Edit]:
    file = function.file
    if isinstance(node, ast.AugAssign):
        start, _, gap = _between(function, node.target, node.value)
        operator = gap.strip().partition("=")[0]
        at = start + gap.index(operator + "=")
        for other in ("", "+", "-", "*", "/"):
            if other != operator:
                yield function.edit(
                    node, "assignment", 1.0 + 0.2 * bool(other), (at, at + len(operator) + 1, f"{other}=")
                )
    elif (
        isinstance(node, ast.Assign)
        and len(node.targets) == 1
        and isinstance(node.targets[0], ast.Name | ast.Subscript)
    ):
        start, _, gap = _between(function, node.targets[0], node.value)
        if gap.count("=") == 1:
            at = start + gap.index("=")
            yield function.edit(node, "assignment", 1.4, (at, at + 1, "+="))
            target = node.targets[0]
            if isinstance(target, ast.Subscript) and not any(isinstance(n, ast.Slice) for n in ast.walk(target)):
                place = file.text(target.slice)
                places = place if isinstance(target.slice, ast.Tuple) else f"({place},)"
                text = f"{file.text(target.value)}.index_put_({places}, {file.text(node.value)}, accumulate=True)"
                yield function.edit(node, "repeated places added", 1.6, (*file.span(node), text))
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield function.edit(node, "statement removed", 1.6, (*file.span(node), "pass"))
    elif isinstance(node, ast.If):
        yield function.edit(node, "condition", 1.3, (*file.span(node.test), f"not ({file.text(node.test)})"))
        for word in ("True", "False"):
            yield function.edit(node, "condition", 1.5, (*file.span(node.test), word))
