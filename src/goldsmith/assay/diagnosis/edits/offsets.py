"""Positions and offsets that are computed wrongly: another origin or stride, one too low, too few bits.

An offset is base + row * stride + column, brought into a range and cut to a width. Kernels use a stride that is one
less, begin a window one early, or keep a hash in 32 bits with a sign.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..graph.graph import Graph
from ..graph.node import Node
from ..graph.tensors import whole
from .golden_edit import CALL, RESULT, Action, GoldenEdit, NamedEdit, do, named
from .primitives.formulas import plus, unchanged
from .primitives.positions import cast_through, reverse, wrap, wraps
from .primitives.tensors import constant

_SHIFTS = frozenset("__rshift__ __lshift__ bitwise_right_shift bitwise_left_shift pow".split())
_MOVES = frozenset("add add_ sub sub_ rsub".split())
_MULS, _DIVS = frozenset("mul mul_".split()), frozenset("floor_divide div div_".split())
_RESTS = frozenset("remainder remainder_ fmod".split())
_CUT = frozenset("bitwise_and bitwise_xor bitwise_or __and__ __xor__ __lshift__ bitwise_left_shift".split())
_ALL = _MOVES | _MULS | _DIVS | _RESTS | _CUT
_LINE = 1024  # operators of one line, at most


def edits(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    if node.name == "arange" and node.out.numel() > 1:
        yield from _counted(node, nodes)
    if node.backward or node.name not in _ALL or not whole(node.out) or node.out.numel() < 2 or len(node.args) < 2:
        return
    yield from _cut_to_a_width(node)
    number = node.args[1]
    if isinstance(number, int) and not isinstance(number, bool):
        if node.name in _MOVES:
            for step, how in ((-1, "low"), (1, "high")):
                text = f"{node.expression} is one too {how}"
                yield named(node, "shifted", 0.45, text, (RESULT, do(plus, c=step)),
                            also=("off_by_one", "mask_shift", "invalid_index"), step=step)  # fmt: skip
        for other, how in ((number - 1, "one less"), (number + 1, "one more")) if node.name in _MULS else ():
            if abs(number) > 1 and other:
                text = f"the stride {number} in {node.expression} is {how}, {other}"
                yield named(node, "wrong_stride", 0.5, text, (1, do(constant, new=other)),
                            also=("invalid_index", "off_by_one"), stride=number, read=other)  # fmt: skip


def _counted(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    """A range from 1 that is read from 0 is off by one; a range from 0 is shifted."""
    causes = ("off_by_one", "shifted") if float(node.out[0]) == 1 else ("shifted", "off_by_one")
    for step, how in ((1, "late"), (-1, "early")):
        text = f"{node.expression} begins one too {how}"
        yield named(node, causes[0], 0.45, text, (RESULT, do(plus, c=step)), also=causes[1:], step=step)
    for bits, dtype in wraps(node.out):
        text = f"{node.expression} wraps at {bits} bits"
        yield named(node, "index_overflow", 0.6, text, (RESULT, do(cast_through, dtype=dtype)), bits=bits)
    of_bits = any(node.index in n.makers and n.name in _SHIFTS for n in nodes)
    cause, other = ("wrong_format", "permuted") if of_bits else ("permuted", "wrong_format")
    text = f"{node.expression} counts down where it should count up"
    yield named(node, cause, 0.45, text, (RESULT, do(reverse, axis=0)), also=(other,))


def _cut_to_a_width(node: Node) -> Iterator[NamedEdit]:
    """With or without a sign: larger values become negative, or wrap around."""
    top, low = int(node.out.max()), int(node.out.min())
    for dtype in (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32):
        info = torch.iinfo(dtype)
        if (top > info.max or low < info.min) and (info.min or low >= 0):
            text = f"{node.expression} is kept in {info.bits} bits {'with a sign' if info.min else 'without one'}"
            yield named(node, "index_overflow", 0.6, text, (RESULT, do(wrap, bits=info.bits, low=info.min)),
                        also=("invalid_index",), bits=info.bits)  # fmt: skip


def left_out(graph: Graph) -> Iterator[NamedEdit]:
    """Shifts that a line adds to positions are left out wherever it runs: all of them, or those of one kind."""
    lines: dict[str, list[Node]] = {}
    for node in graph.nodes:
        number = node.args[1] if len(node.args) > 1 else None
        moves = node.name in ("add", "sub") and whole(node.args[0]) and isinstance(number, int)
        if moves and node.index in graph.behind and node.line and node.args[0].numel() > 1:
            lines.setdefault(node.line, []).append(node)
    for line, members in lines.items():
        names = sorted({node.name for node in members})
        for kind in [names] + [[one] for one in names if len(names) > 1]:
            some = [node for node in members if node.name in kind]
            if any(node.args[1] for node in some) and len(some) <= _LINE:
                signs = " and ".join({"add": "added", "sub": "taken off"}[k] for k in kind)
                text = f"what is {signs} in {members[0].operand(0) or 'positions'} is left out, {len(some)} times"
                edit = GoldenEdit(tuple(Action(node.index, CALL, do(unchanged)) for node in some), line)
                yield NamedEdit("shifted", text, edit, 0.55, {}, ("missing_term", "off_by_one"))
