"""Edits that bring in something of the same scope: another name, an expression from elsewhere, a factor, an addend."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence

from ..reading.value_kinds import fits
from .call_edits import masks_of
from .edits import Edit, Function, likeness, loads
from .neighbour_edits import inlined

_MOST_EXPRESSIONS = 24  # of other places, by the words that they share, for one expression
_WORD = re.compile(r"\w+")
_SUMS, _PRODUCTS = (ast.Add, ast.Sub), (ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult)
_INDEX = ("range", "arange")
_UNREAD = 0.6  # cost less for a name that nothing reads
_REDUCTIONS = ("sum", "max", "min", "dot", "exp")
Expression = tuple[str, frozenset[str], ast.expr]  # text, names in it, where it stands
_IDLE = ("store", "atomic_add", "program_id", "arange", "range", "len", "zeros", "empty", "full")  # no terms of sums


def name_edits(function: Function) -> Iterator[Edit]:
    """Another name of the same kind, a number for a name, the other sign, and the next whole number."""
    for node in _movable(function):
        if isinstance(node, ast.Name):
            yield from _names(function, node)
            yield from _inverse(function, node)
        elif isinstance(node, ast.Call | ast.Subscript) and not _is_index(function, node):
            yield function.swap(node, f"-{function.file.text(node)}", "sign", 1.6)
        elif isinstance(node, ast.Attribute):
            yield from _attributes(function, node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield from _settings(function, node)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            yield from _turned(function, node)
        if not isinstance(node, ast.Constant):
            yield from _moved(function, node)


def scope_edits(function: Function, beside: Sequence[Function], lines: Collection[int]) -> Iterator[Edit]:
    """Edits of the statements in these lines. beside: the other functions, whose expressions may belong here."""
    expressions = [*_expressions(function, beside), *_renamed(function, beside)]
    expressions += [(text, frozenset(), place) for text, place in inlined(function, beside)]
    masks = masks_of(function, beside)
    for node in _movable(function):
        statement = function.statement(node)
        if statement is None or statement.lineno not in lines:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            for name in function.names:
                yield function.swap(node, name, "a name for a number", 2.6 - _UNREAD * (name in function.unread))
        if isinstance(node, ast.Name):
            yield from _names(function, node, others=True)
            yield from _looked_up(function, node)
        elif isinstance(node, ast.BinOp | ast.Call | ast.Subscript):
            yield from _named(function, node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.FloorDiv):
            yield from _groups(function, node, expressions)
        if not isinstance(node, ast.Constant) or _is_range(function, node):
            yield from _exchanged(function, node, expressions)
        if _takes_terms(function, node):
            yield from _terms(function, node, expressions)
        if isinstance(node, ast.Name | ast.Call | ast.Subscript | ast.BinOp) and not _is_index(function, node):
            yield from _wrapped(function, node, masks)
        if isinstance(node, ast.Compare):
            yield from _conditions(function, node)


def _movable(function: Function) -> Iterator[ast.expr]:
    return (node for node in loads(function) if not _is_callee(function, node))


def _is_callee(function: Function, node: ast.expr) -> bool:
    parent = function.file.parents.get(node)
    if isinstance(parent, ast.Call) and parent.func is node:
        return True
    return isinstance(node, ast.Name) and node.id in function.called


def _is_range(function: Function, node: ast.expr) -> bool:
    """Whether an expression is a bound of a loop."""
    parent = function.file.parents.get(node)
    return isinstance(parent, ast.Call) and getattr(parent.func, "id", "") == "range"


def _is_index(function: Function, node: ast.AST) -> bool:
    parent = function.file.parents.get(node)
    return isinstance(parent, ast.Slice) or isinstance(parent, ast.Subscript) and parent.slice is node


def _names(function: Function, node: ast.Name, others: bool = False) -> Iterator[Edit]:
    """others: those that hold values of another kind, instead of those of the same one."""
    own = function.kinds.get(node.id)
    statement = function.statement(node)
    spans = [
        function.file.span(n)
        for n in (ast.walk(statement) if statement is not None and not hasattr(statement, "body") else ())
        if isinstance(n, ast.Name) and n.id == node.id and isinstance(n.ctx, ast.Load)
    ]
    for name in function.names:
        if name != node.id:
            kind = function.kinds.get(name)
            apart = 0.3 if own is None or kind is None else 0.0 if own == kind else 0.3 if fits(own, kind) else 1.2
            if (apart > 1) is others:
                cost = 1.9 + apart - 0.6 * likeness(name, node.id) - _UNREAD * (name in function.unread)
                yield function.swap(node, name, "another name", cost)
                if len(spans) > 1 and spans[0] == function.file.span(node):
                    yield function.edit(node, "another name", cost + 0.1, *((*span, name) for span in spans))
    if not others and (own is None or own[0] != "p"):
        for number in ("0", "1"):
            yield function.swap(node, number, "a number for a name", 2.0 if own is None or own.endswith("[]") else 2.6)
        yield function.swap(node, f"-{node.id}", "sign", 1.6)


def _looked_up(function: Function, node: ast.Name) -> Iterator[Edit]:
    """The entry of a table for its index, where nothing reads the table's pointer."""
    if function.kinds.get(node.id, "?")[0] == "i":
        for table in function.unread:
            if function.kinds.get(table, "?")[0] == "p":
                yield function.swap(node, f"tl.load({table} + {node.id})", "another expression", 1.6)


def _inverse(function: Function, node: ast.Name) -> Iterator[Edit]:
    """The order that undoes one."""
    kind = function.kinds.get(node.id, "")
    triton = any(isinstance(n, ast.Name) and n.id == "tl" for n in function.nodes)
    if kind[:2] == "i[" and kind != "i[]" and not triton:
        yield function.swap(node, f"{node.id}.argsort(-1)", "order undone", 1.6)


def _attributes(function: Function, node: ast.Attribute) -> Iterator[Edit]:
    """Another attribute of the context or of the object."""
    base = node.value.id if isinstance(node.value, ast.Name) else ""
    for other in _kept(function, base):
        if other != node.attr:
            cost = 1.9 - 0.6 * likeness(other, node.attr)
            yield function.swap(node, f"{base}.{other}", "another name", cost)


def _kept(function: Function, base: str) -> dict[str, None]:
    """The attributes of the context or of the object that the file names."""
    nodes = ast.walk(function.file.tree) if base in ("ctx", "self") else ()
    return {n.attr: None for n in nodes if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == base}


def _settings(function: Function, node: ast.Constant) -> Iterator[Edit]:
    """What the caller has chosen for True or False: a name, or what the context keeps."""
    names = [n for n in function.names if function.kinds.get(n, "b[]") == "b[]"]
    bases = {n.id for n in function.nodes if isinstance(n, ast.Name)} & {"ctx", "self"}
    for text in (*names, *(f"{base}.{name}" for base in sorted(bases) for name in _kept(function, base))):
        yield function.swap(node, text, "a name for a number", 1.5)


def _groups(function: Function, node: ast.BinOp, expressions: Sequence[Expression]) -> Iterator[Edit]:
    """`h // (heads // groups)` for `h % groups`: members of groups that are neighbours, not those that take turns."""
    left = function.file.text(node.left)
    for other, _, place in expressions:
        if isinstance(place, ast.BinOp) and isinstance(place.op, ast.FloorDiv):
            yield function.swap(node, f"{left} // ({other})", "another expression", 1.9)
            yield function.swap(node, f"{left} % ({other})", "another expression", 2.1)


def _turned(function: Function, node: ast.BinOp) -> Iterator[Edit]:
    """`a + j` for `a + n - 1 - j`: an index that counts from the other end."""
    one = node.left
    if isinstance(node.right, ast.Name) and isinstance(one, ast.BinOp) and isinstance(one.op, ast.Sub):
        rest = one.left
        if isinstance(one.right, ast.Constant) and one.right.value == 1:
            index = node.right.id
            if isinstance(rest, ast.BinOp) and isinstance(rest.op, ast.Add):
                text = f"{function.file.text(rest.left)} + {index}"
                yield function.swap(node, text, "index turned", 1.5)
            yield function.swap(node, index, "index turned", 1.5)


def _named(function: Function, node: ast.expr) -> Iterator[Edit]:
    """A name for an argument of a call or for a whole value: what an expression computes anew may have a name.

    Elsewhere only a name that is bound to an expression of which this one is a part.
    """
    parent, text = function.file.parents.get(node), function.file.text(node)
    anywhere = isinstance(parent, ast.Call | ast.keyword | ast.Assign | ast.Return)
    inside = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    for name in function.names:
        larger = text in function.bound.get(name, "")
        if function.kinds.get(name, "?")[0] != "p" and (anywhere or larger):
            cost = 2.0 - 0.3 * (name in inside) - _UNREAD * (name in function.unread) - 0.4 * larger
            yield function.swap(node, name, "a name for an expression", cost)


def _moved(function: Function, node: ast.expr) -> Iterator[Edit]:
    """Plus and minus one, where whole numbers are: in indices, ranges, comparisons and sums of names."""
    parent = function.file.parents.get(node)
    name = getattr(getattr(parent, "func", None), "attr", getattr(getattr(parent, "func", None), "id", ""))
    address = isinstance(parent, ast.Call) and _is_address(function, node)
    whole = isinstance(parent, ast.Compare | ast.Subscript | ast.Slice) or name in _INDEX or address
    count = isinstance(node, ast.Name) and function.kinds.get(node.id) == "i[]"
    if isinstance(node, ast.Name | ast.BinOp | ast.Attribute | ast.Call | ast.Subscript):
        text = function.file.text(node)
        for more in ("+ 1", "- 1"):
            yield function.swap(node, f"{text} {more}", "plus or minus one", 1.5 if whole else 1.9 if count else 2.4)


def _expressions(function: Function, beside: Sequence[Function]) -> list[Expression]:
    """Texts of expressions with the names in them; those of other functions only if every name is known here."""
    known = {n.id for n in function.nodes if isinstance(n, ast.Name)} | set(function.names)
    found: dict[str, Expression] = {}
    for each in (function, *beside):
        for node in loads(each):
            if isinstance(node, ast.BinOp | ast.Call | ast.Subscript | ast.Attribute | ast.Compare | ast.UnaryOp):
                names = frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
                text = each.file.text(node)
                if names and names <= known and len(text) < 80 and "\n" not in text and not names & {"ctx", "self"}:
                    found.setdefault(text, (text, names, node))
    return list(found.values())


def _renamed(function: Function, beside: Sequence[Function]) -> list[Expression]:
    """The calls of `_expressions` with a name that nothing reads in the place of the name that is most like it."""
    found: dict[str, Expression] = {}
    for text, names, node in _expressions(function, beside) if function.unread else ():
        for other in function.unread - names if isinstance(node, ast.Call | ast.Subscript) else ():
            name = max(names, key=lambda n: likeness(n, other))
            if fits(function.kinds.get(name, "?"), function.kinds.get(other, "?")):
                changed = re.sub(rf"\b{name}\b", other, text)
                found.setdefault(changed, (changed, names - {name} | {other}, node))
    return list(found.values())


def _exchanged(function: Function, node: ast.expr, expressions: Sequence[Expression]) -> Iterator[Edit]:
    text = function.file.text(node)
    if len(text) > 80 or "\n" in text:
        return
    inner = {id(n) for n in ast.walk(node)}
    words = set(_WORD.findall(text))
    shared = sorted(
        (len(words ^ set(_WORD.findall(other))), other)
        for other, _, place in expressions
        if other != text and id(place) not in inner
    )
    for _, other in shared[:_MOST_EXPRESSIONS]:
        yield function.swap(node, other, "another expression", 2.4 - 1.2 * likeness(text, other))


def _takes_terms(function: Function, node: ast.expr) -> bool:
    """Whether a term may be added here, where no other place gives the same result."""
    parent = function.file.parents.get(node)
    if isinstance(parent, ast.Assign | ast.AugAssign | ast.Return | ast.keyword):
        return not isinstance(node, ast.Tuple | ast.List)
    if isinstance(parent, ast.Call):
        return not isinstance(node, ast.Tuple | ast.List)
    if isinstance(parent, ast.Attribute):  # of a method's tensor
        return isinstance(node, ast.Name) and isinstance(function.file.parents.get(parent), ast.Call)
    return isinstance(parent, ast.BinOp | ast.Compare | ast.Subscript | ast.Slice | ast.Tuple) and not isinstance(
        node, ast.Tuple
    )


def _is_address(function: Function, node: ast.expr) -> bool:
    """Whether an expression is or begins with a pointer."""
    while isinstance(node, ast.BinOp):
        node = node.left
    return isinstance(node, ast.Name) and function.kinds.get(node.id, "?")[0] == "p"


def _forms(function: Function, name: str) -> list[str]:
    """A name as a factor or an addend: one axis also as column and row, where the function holds tiles of two."""
    tiles = any(k.count(",") == 1 for k in function.kinds.values())
    line = re.fullmatch(r"\w\[\d+\]", function.kinds.get(name, "")) is not None
    return [name, *(f"{name}{form}" for form in ("[:, None]", "[None, :]") if tiles and line)]


def _terms(function: Function, node: ast.expr, expressions: Sequence[Expression]) -> Iterator[Edit]:
    if isinstance(node, ast.Constant) and not isinstance(node.value, int | float):
        return
    text, line = function.file.text(node), node.lineno
    if len(text) > 120 or "\n" in text:
        return
    joined = f"({text})" if isinstance(node, ast.BinOp | ast.Compare | ast.IfExp | ast.UnaryOp | ast.BoolOp) else text
    sum_ = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
    library = "tl" if "tl" in {n.id for n in function.nodes if isinstance(n, ast.Name)} else "torch"
    near = {n.id: abs(n.lineno - line) for n in reversed(function.nodes) if isinstance(n, ast.Name)}
    address, parent = _is_address(function, node), function.file.parents.get(node)
    inside = type(parent.op) if isinstance(parent, ast.BinOp) else None  # a part of a sum or product is that itself
    operators = ("" if inside in _SUMS else "+-") + ("" if inside in _PRODUCTS else "*/")
    for name in function.names:
        far, kind = min(0.6, 0.03 * near.get(name, 20)), function.kinds.get(name, "?")
        far -= _UNREAD * (name in function.unread)
        if address:
            if kind[0] in "i?":
                for operator in "+-":
                    cost = 1.3 + far / 2 + 0.3 * (operator == "-")
                    yield function.swap(node, f"{text} {operator} {name}", "offset added", cost)
            continue
        for operator in operators:
            if name == text and operator in "-/" or kind[0] == "p":
                continue
            left = text if operator in "+-" or not sum_ and isinstance(node, ast.BinOp) else joined
            left = joined if operator in "*/" and sum_ else left
            word = "factor added" if operator in "*/" else "addend added"
            for form in _forms(function, name):
                yield function.swap(
                    node,
                    f"{left} {operator} {form}",
                    word,
                    1.7 + far + 0.2 * (operator in "*/") + 0.2 * (operator in "-/"),
                )
        if kind[0] == "f" and inside not in _SUMS:
            yield function.swap(node, f"{text} + {library}.log({name})", "addend added", 2.2 + far)
        if kind[0] in "f?" and name in function.unread and inside not in _SUMS:
            for other in function.names:
                for operator in "+-":
                    yield function.swap(node, f"{text} {operator} {other} * {name}", "addend added", 2.3)
    for factor in () if address else _operations(function, node):
        for operator in ("" if inside in _PRODUCTS else "*") + ("" if inside in _SUMS else "+-"):
            left = joined if operator == "*" else text
            word = "factor added" if operator == "*" else "addend added"
            yield function.swap(node, f"{left} {operator} {factor}", word, 2.0 + 0.2 * (operator != "*"))
    for number in () if address else ("2", "0.5", *_factors(function)):
        yield function.swap(node, f"{joined} * {number}", "factor added", 2.6)
    for operator in () if address or inside in _SUMS else "+-":
        yield function.swap(node, f"1 {operator} {joined}", "addend added", 2.2)
    for other, _, place in expressions:
        far = min(0.6, 0.03 * abs(place.lineno - line))
        product, sum_there = (isinstance(place, ast.BinOp) and isinstance(place.op, ops) for ops in (ast.Mult, _SUMS))
        if product or sum_there or _is_term(place):
            if not sum_there and (inside not in _SUMS or address):
                yield function.swap(node, f"{text} + {other}", "addend added", 2.2 + far)
            if not product and not address and inside not in _PRODUCTS:
                factor = f"({other})" if sum_there else other
                yield function.swap(node, f"{joined} * {factor}", "factor added", 2.2 + far)
        elif isinstance(place, ast.Compare) and isinstance(node, ast.Compare | ast.BinOp | ast.Name):
            yield function.swap(node, f"{joined} & ({other})", "condition added", 1.7 + far)


def _factors(function: Function) -> list[str]:
    """The numbers by which the function multiplies or divides, such as log2(e)."""
    products = (n for n in function.nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult | ast.Div))
    numbers = (n for product in products for n in (product.left, product.right) if isinstance(n, ast.Constant))
    return list(dict.fromkeys(function.file.text(n) for n in numbers if isinstance(n.value, float)))


def _operations(function: Function, node: ast.expr) -> list[str]:
    """The calls in the same statement with another name in the place of one that they read."""
    statement, found = function.statement(node), dict[str, None]()
    for call in ast.walk(statement) if statement is not None and not hasattr(statement, "body") else ():
        if isinstance(call, ast.Call) and _is_term(call) and len(function.file.text(call)) < 60:
            text = function.file.text(call)
            for name in dict.fromkeys(n.id for n in ast.walk(call) if isinstance(n, ast.Name)):
                own = function.kinds.get(name, "?")
                for other in function.names if own[0] == "f" and name not in function.called else ():
                    if other != name and function.kinds.get(other, "?")[0] == "f":
                        found[re.sub(rf"\b{name}\b", other, text)] = None
    return list(found)


def _is_term(node: ast.expr) -> bool:
    """Whether an expression may be a term that is missing elsewhere: no index arithmetic, no new memory."""
    name = getattr(getattr(node, "func", None), "attr", getattr(getattr(node, "func", None), "id", ""))
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Pow | ast.Div)
    return isinstance(node, ast.Subscript | ast.Attribute) or isinstance(node, ast.Call) and name not in _IDLE


def _conditions(function: Function, node: ast.Compare) -> Iterator[Edit]:
    """The same condition for another name as well: rows and columns both have an end."""
    text = function.file.text(node)
    for name in dict.fromkeys(n.id for n in ast.walk(node) if isinstance(n, ast.Name)):
        for other in function.names:
            if other != name and fits(function.kinds.get(name, "?"), function.kinds.get(other, "?")):
                same = re.sub(rf"\b{name}\b", other, text)
                yield function.swap(node, f"({text}) & ({same})", "condition added", 2.2 - 0.4 * likeness(name, other))


def _wrapped(function: Function, node: ast.expr, masks: Sequence[str]) -> Iterator[Edit]:
    text = function.file.text(node)
    if len(text) > 120 or "\n" in text:
        return
    joined = f"({text})" if isinstance(node, ast.BinOp) else text
    triton = "tl" in {n.id for n in function.nodes if isinstance(n, ast.Name)}
    library = "tl" if triton else "torch"
    parent = function.file.parents.get(node)
    callee = parent.func if isinstance(parent, ast.Call) else parent
    if getattr(callee, "attr", "") in _REDUCTIONS or isinstance(parent, ast.Assign | ast.AugAssign | ast.Return):
        for mask in masks:
            for value in ("0.0", '-float("inf")'):
                yield function.swap(node, f"{library}.where({mask}, {text}, {value})", "mask added", 1.8)
            cost = 1.9 - _UNREAD * (mask in function.unread)
            yield function.swap(node, f"{library}.where({mask}, 0.0, {text})", "mask added", cost)
    for call in (".to(tl.float32)",) if triton else (".clone()", ".contiguous()", ".float()", ".detach()", ".T", ".mT"):
        yield function.swap(node, f"{joined}{call}", "call added", 2.0)
