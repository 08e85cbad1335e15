"""Positions and offsets that are computed wrongly: another origin or stride, one too low, too few bits.

An offset is base + row * stride + column, brought into a range and cut to a width. Kernels use a stride that is one
less, begin a window one early, or keep a hash in 32 bits with a sign.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..graph.node import Node
from ..graph.tensors import whole
from .golden_edit import RESULT, NamedEdit, do, named
from .primitives.formulas import plus
from .primitives.positions import wrap
from .primitives.tensors import constant

_MOVES = frozenset("add add_ sub sub_ rsub".split())
_MULS = frozenset("mul mul_".split())
_CUT = frozenset("bitwise_and bitwise_xor bitwise_or __and__ __xor__ __lshift__ bitwise_left_shift".split())
_ALL = _MOVES | _MULS | _CUT


def edits(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
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


def _cut_to_a_width(node: Node) -> Iterator[NamedEdit]:
    """With or without a sign: larger values become negative, or wrap around."""
    top, low = int(node.out.max()), int(node.out.min())
    for dtype in (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32):
        info = torch.iinfo(dtype)
        if (top > info.max or low < info.min) and (info.min or low >= 0):
            text = f"{node.expression} is kept in {info.bits} bits {'with a sign' if info.min else 'without one'}"
            yield named(node, "index_overflow", 0.6, text, (RESULT, do(wrap, bits=info.bits, low=info.min)),
                        also=("invalid_index",), bits=info.bits)  # fmt: skip
