"""Integer and boolean inputs: indices, offsets, lengths and packed numbers that are read as others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, product

import torch
from torch import Tensor

from ..graph.tensors import floating, whole
from .golden_edit import RESULT, Action, GoldenEdit, NamedEdit, Primitive, do, of_inputs
from .inputs import reading
from .primitives import positions as p

_ROWS = 1 << 16
_BLOCK = 16  # the largest block that lengths are padded to, since tested cases are small
_BEYOND = ("stray_read", "overrun")
_SIZES = 6  # sizes of the case that lengths may be replaced by
_COUNTS = 4  # inputs that may be lengths
Inputs = Mapping[str, Tensor]
_HALVES = (
    ("low and high four bits of a byte are exchanged", "halves exchanged", ("permuted", "swapped_results")),
    ("both numbers of a byte are its low four bits", "low halves", ("wrong_stride",)),
    ("both numbers of a byte are its high four bits", "high halves", ("wrong_stride",)),
)


def edits(inputs: Inputs, numbers: Mapping[str, object]) -> Iterator[NamedEdit]:
    for name, t in inputs.items():
        if not t.numel() or not (whole(t) or t.dtype == torch.bool):
            continue
        if whole(t):
            yield from _numbers(name, t)
            yield from _lengths(name, t)
            yield from _sorted_by(name, t, inputs)
    bytes_ = [n for n, t in inputs.items() if t.dtype == torch.uint8 and not n.startswith("grad_") and t.numel()]
    for names in (*((n,) for n in bytes_), *((tuple(bytes_),) if len(bytes_) > 1 else ())):
        for text, rule, also in _HALVES:
            text = f"{text} of {' and '.join(names)}"
            yield of_inputs(names, "wrong_format", 0.5, text, _rule(rule), also=also, input=names[0])
    yield from filled(inputs, numbers)


def _rule(rule: str, c: int = 0) -> Primitive:
    return do(p.replace_integers, rule=rule, c=c)


def _numbers(name: str, t: Tensor) -> Iterator[NamedEdit]:
    one = (name,)
    cause = "off_by_one" if bool((t.diff() >= 0).all()) else "shifted"  # offsets ascend
    for step in (1, -1):
        for how in ("within its range", "wrapping around"):
            text = f"{name} is {step:+d}, {how}"
            yield of_inputs(one, cause, 0.5, text, _rule(f"plus, {how}", step), input=name)
        text = f"every number in {name} is {step:+d}"
        yield of_inputs(one, "off_by_one", 0.55, text, _rule("plus", step), input=name)
        for axis, n in enumerate(t.shape):
            if n > 1:
                text = f"{name} is shifted by {step:+d} along axis {axis}"
                move = do(p.shift, axis=axis, step=step, edge="around")
                yield of_inputs(one, "shifted", 0.4, text, move, input=name, axis=axis, step=step)
    for bits, dtype in p.wraps(t):
        yield of_inputs(one, "index_overflow", 0.6, f"{name} wraps at {bits} bits", do(p.cast_through, dtype=dtype),
                        input=name)  # fmt: skip
    yield of_inputs(one, "wrong_stride", 0.5, f"{name} is halved", _rule("halved"), input=name)


def _lengths(name: str, t: Tensor) -> Iterator[NamedEdit]:
    """Lengths extended to the end of their block or to the longest; zero lengths taken for one or for all."""
    low, high, one = int(t.min()), int(t.max()), (name,)
    for what, rule in (("one", "at least one"), ("all", "none is all")) if low == 0 < high else ():
        text = f"an empty entry of {name} is taken to have {what}"
        yield of_inputs(one, "empty_group", 0.5, text, _rule(rule), also=("wrong_mask", "off_by_one"), input=name)
    if low < 0 or high < 2:
        return
    for block in range(2, min(high, _BLOCK) + 1):
        text = f"{name} is taken to the end of its block of {block}"
        yield of_inputs(one, "wrong_mask", 0.5, text, _rule("whole blocks", block), also=_BEYOND, input=name,
                        block=block)  # fmt: skip
    if low < high:
        text = f"the largest of {name} is used for all"
        yield of_inputs(one, "wrong_mask", 0.45, text, _rule("the largest for all"), also=_BEYOND, input=name)


def _sorted_by(index: str, by: Tensor, inputs: Inputs) -> Iterator[NamedEdit]:
    """Rows in the order that sorts one of their indices, or counted from the beginning of every segment."""
    if not 2 < by.numel() <= _ROWS:
        return
    if not bool((by.flatten().argsort(stable=True).diff() > 0).all()):
        for how, undone in ((f"sorts {index}", False), (f"undoes the sorting of {index}", True)):
            for name, t in inputs.items():
                axes = next((d for d in range(1, t.dim() + 1) if t.shape[:d].numel() == by.numel()), 0)
                if floating(t) and axes:
                    text = f"the rows of {name} are read in the order that {how}"
                    order = do(p.by_order_of, axes=axes, undone=undone)
                    edit = of_inputs((name,), "permuted", 0.55, text, order, operand=name, axis=0)
                    yield reading(edit, by=index)
    if by.dim() == 1 and not int(by[0]) and 2 < int(by[-1]) <= _ROWS and bool((by.diff() >= 0).all()):
        for name, t in inputs.items():
            if name != index and t.dim() and t.shape[0] == int(by[-1]):
                text = f"{name} is read from its beginning in every segment: the offset from {index} is not added"
                edit = of_inputs((name,), "invalid_index", 0.55, text, do(p.within_segments),
                                 also=("wrong_stride", "shifted"), operand=name, axis=0)  # fmt: skip
                yield reading(edit, offsets=index)


def filled(inputs: Inputs, numbers: Mapping[str, object]) -> Iterator[NamedEdit]:
    """Lengths replaced by a size of the case: the padding after a sequence counts as part of it."""
    sizes = {k: n for k, n in numbers.items() if isinstance(n, int) and not isinstance(n, bool) and n > 1}
    fits: dict[str, list[tuple[str, int]]] = {}
    for name, t in inputs.items():
        if whole(t) and t.dim() and t.numel() and int(t.min()) >= 0 and len(fits) < _COUNTS:
            dims = {n for other in inputs.values() if floating(other) for n in other.shape}
            some = [(k, n) for k, n in sizes.items() if n in dims and n >= int(t.max()) and not bool((t == n).all())]
            fits[name] = some[:_SIZES]
    alone = [((name, k, n),) for name, some in fits.items() for k, n in some]
    pairs = [((a, *x), (b, *y)) for a, b in combinations(fits, 2) for x, y in product(fits[a], fits[b]) if x[0] != y[0]]
    for chosen in (*alone, *pairs):
        text = " and ".join(f"every number of {name} counts as {k}, {n}" for name, k, n in chosen)
        edit = GoldenEdit(tuple(Action(name, RESULT, _rule("all", n)) for name, _, n in chosen))
        yield NamedEdit("wrong_mask", text, edit, 0.5 - 0.05 * (len(chosen) > 1), {"input": chosen[0][0]},
                        ("invalid_index", "stray_read"))  # fmt: skip
