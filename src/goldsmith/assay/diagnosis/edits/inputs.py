"""Inputs and output gradients: exchanged, transposed, shifted, in another order, in another format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, islice, product

import torch
from torch import Tensor

from ..graph.tensors import floating
from .golden_edit import RESULT, Action, GoldenEdit, NamedEdit, do, of_inputs
from .primitives import positions as p
from .primitives.formulas import applied
from .primitives.tensors import STRIDES, read_other

_NUMBERS = 1 << 20
_BLOCKS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, 128)
_MEANT = 8  # combinations of axes of one length
Inputs = Mapping[str, Tensor]
# (cause, text, function, prior, which number the factor is)
_VALUES: tuple[tuple[str, str, Callable[[Tensor], Tensor], float, str], ...] = (
    ("sign_flip", "has the other sign", torch.neg, 0.5, ""),
    ("wrong_factor", "counts as one", torch.ones_like, 0.55, "1/{}"),
    ("missing_term", "counts as zero", torch.zeros_like, 0.5, ""),
    ("wrong_factor", "is squared", torch.square, 0.4, "{}"),
    ("wrong_factor", "is taken with one added", lambda t: t + 1, 0.45, ""),
    ("wrong_factor", "counts as one less itself", lambda t: 1 - t, 0.45, ""),
    ("wrong_factor", "is taken without its sign", torch.abs, 0.3, ""),
)


def edits(inputs: Inputs, narrowable: frozenset[str]) -> Iterator[NamedEdit]:
    """narrowable: the inputs that are float32 in the candidate's run."""
    for name, t in inputs.items():
        if floating(t) and t.numel():
            yield from _rearranged(name, t)
            for cause, text, of, prior, number in _VALUES:
                yield of_inputs((name,), cause, prior, f"{name} {text}", do(applied, of=of), factor=name, term=name,
                                named=number.format(name))  # fmt: skip
            for dtype in (torch.bfloat16, torch.float16) if name in narrowable else ():
                kind = str(dtype).removeprefix("torch.")
                text = f"{name} is rounded to {kind} before it is used"
                cast = do(p.cast_through, dtype=dtype)
                yield of_inputs((name,), "low_precision_accumulation", 0.5, text, cast, input=name, dtype=kind)
    yield from _one_for_all(inputs)
    yield from _exchanged(inputs)
    yield from _in_blocks(inputs)
    for name, t in inputs.items():
        stacked = floating(t) and not name.startswith("grad_") and t.dim() > 1 and len(t) > 2 and t.numel() <= _NUMBERS
        if stacked and t[0].numel() > 1 and t[0].numel() % 2 == 0:
            text = f"the stride between the entries of {name} is half of the right one"
            yield of_inputs((name,), "wrong_stride", 0.6, text, do(p.half_stride), also=("invalid_index",),
                            operand=name, input=name, axis=0)  # fmt: skip


def _rearranged(name: str, t: Tensor) -> Iterator[NamedEdit]:
    one = (name,)
    for i, j in combinations(range(t.dim()), 2):
        if t.shape[i] == t.shape[j] > 1:
            text = f"axes {i} and {j} of {name} are transposed"
            yield of_inputs(one, "transposed", 0.75, text, do(p.exchange, i=i, j=j), operand=name, axes=[i, j])
    if t.dim() >= 2 and t.shape[-1] == t.shape[-2] > 2:  # sums over a triangle
        for offset, where in ((-1, "below"), (1, "above")):
            if bool(t.diagonal(offset, -2, -1).any()):
                text = f"the elements of {name} just {where} its diagonal are left out"
                fill = do(p.fill_diagonal, offset=offset, value=0.0)
                yield of_inputs(one, "off_by_one", 0.45, text, fill, also=("truncated_reduction", "mask_shift"),
                                input=name)  # fmt: skip
        fill = do(p.fill_diagonal, offset=0, value=1.0)
        yield of_inputs(one, "wrong_factor", 0.45, f"the diagonal of {name} counts as ones", fill, factor=name)
    if t.dim() >= 2 and t.shape[-1] != t.shape[-2] and min(t.shape[-2:]) > 1:
        for text, read in STRIDES:
            yield of_inputs(one, "wrong_stride", 0.65, text.format(name), do(read), operand=name)
    for axis, n in enumerate(t.shape):
        if n < 2:
            continue
        for step in (1, -1):
            text = f"{name} is shifted by {step:+d} along axis {axis}"
            for edge, how, prior in (
                ("around", "", 0.6), ("zero", ", filled with zeros", 0.5), ("own", ", repeating its end", 0.5),
            ):  # fmt: skip
                if edge != "own" or n > 2:  # with two places one stands for both, which is an edit of its own
                    move = do(p.shift, axis=axis, step=step, edge=edge)
                    yield of_inputs(one, "shifted", prior, text + how, move, operand=name, axis=axis, step=step)
        for cause, prior, text, primitive in (
            ("permuted", 0.5, f"{name} is reversed along axis {axis}", do(p.reverse, axis=axis)),
            ("wrong_stride", 0.45, f"every second index of axis {axis} of {name} is read twice",
             do(p.reindex, axis=axis, rule="halved")),
            ("wrong_stride", 0.45, f"{name} is read with twice its stride along axis {axis}",
             do(p.reindex, axis=axis, rule="doubled")),
            ("missing_partition", 0.45, f"the second half of axis {axis} of {name} is read as the first",
             do(p.reindex, axis=axis, rule="second half")),
        ):  # fmt: skip
            yield of_inputs(one, cause, prior, text, primitive, operand=name, axis=axis)


def _alike(inputs: Inputs) -> list[tuple[str, ...]]:
    """Inputs of one shape, such as cosines and sines."""
    shapes: dict[torch.Size, list[str]] = {}
    for name, t in inputs.items():
        shapes.setdefault(t.shape, []).append(name)
    return [tuple(names) for names in shapes.values() if len(names) > 1]


def _own(inputs: Inputs) -> Inputs:
    return {n: t for n, t in inputs.items() if not n.startswith("grad_")}


def _one_for_all(inputs: Inputs) -> Iterator[NamedEdit]:
    """One place of an axis used for all: a block's number, such as its scale, that is read after the loop."""
    groups: dict[tuple[tuple[str, int], ...], None] = {}
    own = {n: t for n, t in _own(inputs).items() if floating(t) and t.dim()}
    for n in sorted({n for t in own.values() for n in t.shape if n > 1}):
        axes = [[(m, d) for d, k in enumerate(t.shape) if k == n] for m, t in own.items() if n in t.shape]
        for some in (*islice(product(*axes), _MEANT), *((one,) for mine in axes for one in mine)):
            groups.setdefault(some)
    for some in groups:
        for which, cause, also in (
            ("last", "wrong_factor", ("missing_rescale", "overwritten_accumulator")),
            ("first", "wrong_stride", ("wrong_factor",)),
        ):
            of = " and ".join(f"axis {d} of {m}" for m, d in some)
            edit = GoldenEdit(tuple(Action(m, RESULT, do(p.reindex, axis=d, rule=which)) for m, d in some))
            params = {"operand": some[0][0], "factor": some[0][0], "axis": some[0][1]}
            yield NamedEdit(cause, f"the {which} along {of} is used for all", edit, 0.45, params, also)


def _exchanged(inputs: Inputs) -> Iterator[NamedEdit]:
    for (a, s), (b, t) in combinations(inputs.items(), 2):
        if s.shape != t.shape or s.dtype != t.dtype or not s.numel() or torch.equal(s, t):
            continue
        read = {there: Action(here, RESULT, do(read_other), (("other", there),)) for there, here in ((a, b), (b, a))}
        text = f"{a} and {b} are exchanged"
        edit = GoldenEdit((read[b], read[a]))
        yield NamedEdit("swapped_results", text, edit, 0.75, {"exchanged": [a, b]})
        for there, here in ((a, b), (b, a)):
            cause, also = "wrong_saved_tensor", ("swapped_results", "invalid_index")
            if not s.is_floating_point() and s.dtype != torch.bool:
                cause, also = "invalid_index", ("permuted", "wrong_saved_tensor")
            yield NamedEdit(cause, f"{there} is read in place of {here}", GoldenEdit((read[there],)), 0.5,
                            {"read": there, "operand": here}, also)  # fmt: skip


def _in_blocks(inputs: Inputs) -> Iterator[NamedEdit]:
    """Positions counted from the start of their block, without the block's offset; or the block's number itself."""
    own = {n: t for n, t in _own(inputs).items() if 0 < t.numel() <= _NUMBERS}
    for names in (*((n,) for n in own), *_alike(own)):
        rarer = 0.01 * (len(names) > 1)
        for axis, n in enumerate(own[names[0]].shape):
            for block in (b for b in _BLOCKS if 2 < n > b):
                where = f"along axis {axis} of {' and '.join(names)}"
                params = {"operand": names[0], "input": names[0], "axis": axis, "block": block}
                text = f"{where} every block of {block} reads the first block: the block's offset is not added"
                within = do(p.reindex, axis=axis, rule="within block", block=block)
                yield of_inputs(names, "invalid_index", 0.47 - rarer, text, within,
                                also=("wrong_stride", "wrong_factor"), **params)  # fmt: skip
                text = f"{where} the number of the block of {block} is used as the position"
                number = do(p.reindex, axis=axis, rule="block", block=block)
                yield of_inputs(names, "wrong_stride", 0.42 - rarer, text, number, also=("invalid_index",), **params)


def reading(edit: NamedEdit, **reads: str) -> NamedEdit:
    """The edit, whose primitives also get other inputs."""
    actions = tuple(replace(a, reads=tuple(reads.items())) for a in edit.edit.actions)
    return edit.acting(*actions)
