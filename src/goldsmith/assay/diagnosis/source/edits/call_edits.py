"""Edits of calls: keywords, neutral elements and masks of loads, types, loop bounds, exchanged entries."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence

from .edits import Edit, Function, loads

_INFINITE = ('-float("inf")', 'float("inf")')
_NAME = re.compile(r"[A-Za-z_]\w*")
_NEUTRAL = (*_INFINITE, "0.0", "1.0", "0")
_REDUCTIONS = frozenset("sum mean amax amin max min prod argmax argmin var std norm any logsumexp".split())
_INDICES = {"[:, None]": 1.0, "[None, :]": 1.3}  # cost of an axis of length 1 in the place of the one that was reduced
_KEYWORDS: tuple[tuple[frozenset[str], tuple[str, ...]], ...] = (
    (_REDUCTIONS, ("keepdim=True", "dim=0", "dim=-1", "axis=0", "axis=1")),
    (frozenset(("var", "std", "var_mean")), ("correction=0", "unbiased=False")),
    (frozenset(("sum", "mean", "cumsum", "softmax", "log_softmax", "prod")), ("dtype=torch.float32",)),
    (frozenset(("cumsum", "associative_scan", "cumprod")), ("reverse=True",)),
    (frozenset(("dot",)), ('input_precision="ieee"',)),
    (frozenset(("index_put_", "index_put")), ("accumulate=True",)),
    (frozenset(("searchsorted", "bucketize")), ("right=True",)),
    (frozenset(("topk",)), ("largest=False",)),
    (frozenset(("sort", "argsort")), ("descending=True", "stable=True")),
    (frozenset(("div", "divide")), ('rounding_mode="floor"', 'rounding_mode="trunc"')),
    (frozenset(("gelu",)), ('approximate="tanh"',)),
    (frozenset(("clamp", "clip")), ("min=0", "max=1")),
    (frozenset(("zeros", "ones", "full", "empty", "arange", "zeros_like", "empty_like")),
     ("dtype=torch.float32", "dtype=torch.int64", "dtype=torch.float64")),
    (frozenset(("scatter_reduce", "scatter_reduce_", "index_reduce_")), ("include_self=False",)),
    (frozenset(("repeat_interleave",)), ("dim=0", "dim=1")),
    (frozenset(("cat", "stack", "flip")), ("dim=-1", "dim=1")),
)  # fmt: skip
_LIMITS = {"minimum": ("<=", "<"), "maximum": (">=", ">")}
_SHORT = (ast.Name, ast.Constant, ast.UnaryOp)
_CASTS = ("float", "double", "half", "bfloat16", "int", "long")
_DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64")


def call_edits(function: Function, beside: Sequence[Function] = ()) -> Iterator[Edit]:
    """beside: the other functions, whose conditions may belong here."""
    masks = masks_of(function, beside)
    numbers = _numbers(function)
    for node in loads(function):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield from _keywords(function, node, name)
            if name in _REDUCTIONS:
                yield from _kept_axis(function, node)
            if _is_triton(node) and name in ("load", "store"):
                yield from _masked(function, node, name, masks)
            if name == "range" and isinstance(node.func, ast.Name):
                yield from _ranges(function, node)
            if name == "cdiv" and len(node.args) == 2:
                first, second = (function.file.text(a) for a in node.args)
                yield function.swap(node, f"({first}) // ({second})", "rounding", 1.2)
            if name in _CASTS and isinstance(node.func, ast.Attribute) and not node.args:
                end = function.file.span(node.func)[1]
                for other in _CASTS:
                    if other != name:
                        yield function.edit(node, "dtype", 1.4, (end - len(name), end, other))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
            left, right = function.file.text(node.left), function.file.text(node.right)
            yield function.swap(node, f"({left} + {right} - 1) // {right}", "rounding", 1.3)
        elif isinstance(node, ast.Attribute) and node.attr in _DTYPES:
            end = function.file.span(node)[1]
            for other in _DTYPES:
                if other != node.attr:
                    cost = 1.3 + 0.1 * (other != "float32")  # the one in which kernels add
                    yield function.edit(node, "dtype", cost, (end - len(node.attr), end, other))
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            for text in numbers:
                if text != function.file.text(node):
                    yield function.swap(node, text, "another number", 1.9)
        elif isinstance(node, ast.Dict):
            yield from _exchanged(function, node, [v for v in node.values if v is not None])
        yield from _moved_addend(function, node)
    for other_node in function.nodes:
        if isinstance(other_node, ast.Tuple | ast.List):
            yield from _exchanged(function, other_node, list(other_node.elts))


def _is_triton(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in ("tl", "language")


def masks_of(function: Function, beside: Sequence[Function] = ()) -> list[str]:
    """Texts of conditions: comparisons, and names that hold truth values of several elements.

    Those of other functions only if every name is known here.
    """
    found = dict.fromkeys(_masks(function))
    known = set(function.names)
    for each in beside:
        found |= dict.fromkeys(m for m in _masks(each) if set(_NAME.findall(m)) <= known)
    return list(found)


def _masks(function: Function) -> Iterator[str]:
    masks = {n for n in function.names if function.kinds.get(n, "").startswith("b[") or "mask" in n}
    yield from sorted(masks & function.unread)
    for node in loads(function):
        name = isinstance(node, ast.Name) and node.id in masks
        if name or isinstance(node, ast.Compare) or isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            text = function.file.text(node)
            if len(text) < 80 and "\n" not in text:
                yield text
        elif isinstance(node, ast.Call):
            yield from _within(function, node)


def _within(function: Function, node: ast.Call) -> Iterator[str]:
    """Where a limit leaves a number as it is, which the gradient of the limit needs."""
    name = getattr(node.func, "attr", "")
    if name in _LIMITS and len(node.args) == 2 and all(isinstance(a, _SHORT) for a in node.args):
        value, limit = (function.file.text(a) for a in node.args)
        yield from (f"{value} {sign} {limit}" for sign in _LIMITS[name])


def _numbers(function: Function) -> list[str]:
    """The numbers that occur in the function."""
    values = [n for n in loads(function) if isinstance(n, ast.Constant) and type(n.value) in (int, float)]
    return list(dict.fromkeys(function.file.text(n) for n in values))[:12]


def _keywords(function: Function, node: ast.Call, name: str) -> Iterator[Edit]:
    known = {k.arg for k in node.keywords}
    start = function.file.span(node.func)[1]
    end = function.file.span(node)[1] - 1
    empty = not node.args and not node.keywords
    trailing = function.file.data[start:end].rstrip().endswith(b",")
    for names, texts in _KEYWORDS:
        for text in texts if name in names else ():
            word = text.partition("=")[0]
            if word not in known and not (word in ("dim", "axis") and known & {"dim", "axis"}):
                cost = 1.5 if word in ("input_precision", "accumulate", "right", "stable", "correction") else 1.9
                yield function.edit(node, "keyword added", cost, (end, end, text if empty or trailing else f", {text}"))
    for keyword in node.keywords:
        if isinstance(keyword.value, ast.Constant) and keyword.value.value is None:
            continue
        if keyword.arg is not None and len(node.keywords) > 1:
            for other in node.keywords:
                if other is not keyword and other.arg is not None and other.lineno >= keyword.lineno:
                    first, second = function.file.span(keyword.value), function.file.span(other.value)
                    if first < second:
                        yield function.edit(
                            node, "arguments swapped", 1.9, (*first, function.file.text(other.value)),
                            (*second, function.file.text(keyword.value)),
                        )  # fmt: skip


def _kept_axis(function: Function, node: ast.Call) -> Iterator[Edit]:
    """The result of a reduction as a column or a row, where it would broadcast along the wrong axis."""
    parent = function.file.parents.get(node)
    method = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") not in function.called
    axis = len(node.args) > (0 if method else 1) or any(k.arg in ("dim", "axis") for k in node.keywords)
    indexed = isinstance(parent, ast.Subscript) and parent.value is node
    if axis and not indexed and isinstance(node.func, ast.Attribute):
        for index, cost in _INDICES.items():
            yield function.swap(node, f"{function.file.text(node)}{index}", "index added", cost)


def _masked(function: Function, node: ast.Call, name: str, masks: list[str]) -> Iterator[Edit]:
    """The mask of a load or store, and the value of masked elements, as keywords or by position."""
    given = {k.arg: k.value for k in node.keywords}
    places = ("pointer", "mask", "other") if name == "load" else ("pointer", "value", "mask")
    given |= dict(zip(places, node.args, strict=False))
    end = function.file.span(node)[1] - 1
    if "other" in given:
        text = function.file.text(given["other"])
        for value in _NEUTRAL:
            if value != text:
                yield function.swap(given["other"], value, "value of masked elements", 1.1)
    elif name == "load" and "mask" in given:
        for value in _NEUTRAL[:4]:
            yield function.edit(node, "value of masked elements", 1.3, (end, end, f", other={value}"))
    for mask in masks:
        if "mask" not in given:
            yield function.edit(node, "mask added", 1.5, (end, end, f", mask={mask}"))
            if name == "load":
                for value in _NEUTRAL[:3]:
                    yield function.edit(node, "mask added", 1.7, (end, end, f", mask={mask}, other={value}"))
        elif mask != function.file.text(given["mask"]):
            own = function.file.text(given["mask"])
            yield function.swap(given["mask"], mask, "another mask", 1.5)
            yield function.swap(given["mask"], f"({own}) & ({mask})", "condition added", 1.1)
    if name == "store" and len(node.args) > 1:
        start = function.file.span(node.func)[1]
        yield function.edit(node, "function", 1.2, (start - len(name), start, "atomic_add"))


def _ranges(function: Function, node: ast.Call) -> Iterator[Edit]:
    texts = [function.file.text(a) for a in node.args]
    others = [f"0, {texts[0]}", f"1, {texts[0]}", f"1, {texts[0]} + 1", f"{texts[0]} - 1, -1, -1"]
    if len(texts) >= 2:
        others = [texts[1], *(f"{texts[0]}, {texts[1]} {s} {texts[2]}, {texts[2]}" for s in "+-" if len(texts) == 3)]
        step = texts[2] if len(texts) == 3 else "1"
        others += [f"0, {texts[1]}, {step}"] + [f"{texts[0]}, {texts[1]}"] * (len(texts) == 3)
    start, end = function.file.span(node.func)[1] + 1, function.file.span(node)[1] - 1
    for other in others:
        if other != ", ".join(texts):
            yield function.edit(node, "loop bounds", 1.4, (start, end, other))
    parent = function.file.parents.get(node)
    if isinstance(parent, ast.For | ast.comprehension):
        yield function.swap(node, f"reversed({function.file.text(node)})", "loop turned", 1.5)


def _exchanged(function: Function, node: ast.AST, entries: list[ast.expr]) -> Iterator[Edit]:
    texts = [function.file.text(e) for e in entries]
    for (i, first), (j, second) in itertools.combinations(enumerate(entries), 2):
        plain = not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred)
        if plain and texts[i] != texts[j] and len(entries) <= 12:
            cost = 1.3 if j == i + 1 else 1.6
            yield function.edit(
                node, "entries exchanged", cost, (*function.file.span(first), texts[j]),
                (*function.file.span(second), texts[i]),
            )  # fmt: skip


def _moved_addend(function: Function, node: ast.expr) -> Iterator[Edit]:
    """`f(a + e)` for `f(a) + e`, and `f(a) + e` for `f(a + e)`; the same for factors."""
    file = function.file
    if isinstance(node, ast.Call):
        method = isinstance(node.func, ast.Attribute) and not node.args and isinstance(node.func.value, ast.BinOp)
        inner = node.func.value if method else node.args[0] if len(node.args) == 1 else None  # type: ignore[attr-defined]
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Add | ast.Mult | ast.Sub):
            sign = {ast.Add: "+", ast.Mult: "*", ast.Sub: "-"}[type(inner.op)]
            left, right = file.text(inner.left), file.text(inner.right)
            whole, start = file.text(node), file.span(node)[0]
            a, b = (p - start for p in file.span(inner))
            kept = whole.encode()
            for one, rest in ((left, right), (right, left)):
                text = (kept[:a] + one.encode() + kept[b:]).decode()
                yield function.swap(node, f"({text} {sign} {rest})", "term moved out", 1.8)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        sign = "+" if isinstance(node.op, ast.Add) else "*"
        for call, other in ((node.left, node.right), (node.right, node.left)):
            if isinstance(call, ast.Call) and len(call.args) == 1 and not call.keywords:
                if isinstance(other, ast.Name | ast.Constant):
                    end = file.span(call.args[0])[1] - file.span(call)[0]
                    raw = file.text(call).encode()
                    text = (raw[:end] + f" {sign} {file.text(other)}".encode() + raw[end:]).decode()
                    yield function.swap(node, text, "term moved in", 1.8)
