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
_WIDTHS = ((torch.int64, torch.int32), (torch.int32, torch.uint8), (torch.int64, torch.uint8))
_SIZES = 6  # sizes of the case that lengths may be replaced by
_COUNTS = 4  # inputs that may be lengths
Inputs = Mapping[str, Tensor]
_FLAGS = (("counts as its opposite", "opposite"), ("counts as true", "true"), ("counts as false", "false"))
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
            yield from _orders(name, t)
            yield from _sorted_by(name, t, inputs)
        if not name.startswith("grad_"):
            yield from _shifted(name, t)
            yield from _formats(name, t)
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


def _orders(name: str, t: Tensor) -> Iterator[NamedEdit]:
    """Another order of the same indices; offsets whose inner values are off by one."""
    if t.dim() != 1 or len(t) < 3:
        return
    own, one = torch.arange(len(t), device=t.device), (name,)
    if torch.equal(t.sort().values.long(), own) and not torch.equal(t.long(), own):
        text = f"{name} is read as its inverse permutation"
        yield of_inputs(one, "permuted", 0.55, text, _rule("inverse"), input=name)
        yield of_inputs(one, "permuted", 0.55, f"{name} is not applied", _rule("own order"), input=name)
    if bool((t.diff() >= 0).all()) and int(t[0]) < int(t[-1]):
        for step in (1, -1):
            text = f"{name} is {step:+d} but for its ends"
            yield of_inputs(one, "off_by_one", 0.5, text, _rule("plus but for its ends", step), input=name)
    elif int(t.min()) < int(t.max()):
        text = f"the first of {name} is used for all"
        yield of_inputs(one, "wrong_stride", 0.5, text, _rule("the first for all"), input=name)


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


def _shifted(name: str, t: Tensor) -> Iterator[NamedEdit]:
    for axis, n in enumerate(t.shape):
        for step in (1, -1) if n > 1 else ():
            for how, edge in (("filled with zeros", "zero"), ("repeating its end", "own")):
                text = f"{name} is shifted by {step:+d} along axis {axis}, {how}"
                move = do(p.shift, axis=axis, step=step, edge=edge)
                yield of_inputs((name,), "shifted", 0.45, text, move, also=("off_by_one",), input=name, axis=axis,
                                step=step)  # fmt: skip


def _formats(name: str, t: Tensor) -> Iterator[NamedEdit]:
    one = (name,)
    for wide, narrow in _WIDTHS:
        width = do(p.read_as_width, wide=wide, narrow=narrow)
        if t.numel() > 1 and not torch.equal(width(t), t):
            bits = 8 * wide.itemsize, 8 * narrow.itemsize
            text = f"{name} is stored in {bits[0]} bits per number and read in {bits[1]}"
            yield of_inputs(one, "dtype_width", 0.45, text, width, also=("wrong_format", "wrong_stride"), input=name,
                            bits=list(bits))  # fmt: skip
    if t.dtype == torch.bool:
        for text, rule in _FLAGS:
            yield of_inputs(one, "wrong_mask", 0.5, f"{name} {text}", _rule(rule), input=name)
        for axis, n in enumerate(t.shape):
            if n > 1:
                text = f"{name} is reversed along axis {axis}"
                yield of_inputs(one, "permuted", 0.4, text, do(p.reverse, axis=axis), input=name, axis=axis)
    for size, what in ((1, "bits"), (2, "pairs of bits")) if t.dtype in (torch.uint8, torch.int8) else ():
        text = f"the {what} of every byte of {name} are read from the other end"
        yield of_inputs(one, "wrong_format", 0.55, text, do(p.reverse_bits, bits=size), also=("permuted",), input=name)


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
