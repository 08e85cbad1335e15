"""Lanes beyond a row's end that enter a reduction: they are loaded as 0, but later operators make them nonzero."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...graph.graph import Graph
from ...graph.node import Key
from ...graph.tensors import floating
from ..golden_edit import RESULT, NamedEdit, do, named
from ..primitives.spans import BLOCKS
from ..primitives.tensors import add_constant
from ..reductions import one_axis

_ON_ELEMENTS = frozenset(
    """add sub rsub mul div pow square abs neg exp sigmoid tanh silu gelu relu sqrt rsqrt log softplus sin cos
    clamp clamp_min clamp_max maximum minimum""".split()
)
_DEPTH = 8  # operators between the load and the sum


def edits(graph: Graph) -> Iterator[NamedEdit]:
    """Sums and means over n to which each lane up to a block's end adds the value computed from 0."""
    for node in graph.nodes:
        summed = node.index in graph.behind and node.name in ("sum", "mean") and node.args and floating(node.args[0])
        axis = one_axis(node) if summed and node.args[0].dim() else None
        n = 0 if axis is None else node.args[0].shape[axis]
        if axis is None or n < 2:
            continue
        try:
            lane = _of_zero(graph, node.makers[0], node.args[0], axis - node.args[0].dim(), _DEPTH)
        except RuntimeError:  # a view lies between, so the axes differ
            continue
        if not bool(torch.isfinite(lane).all()) or not bool(lane.any()):
            continue
        lane = lane if len(node.args) > 2 and bool(node.args[2]) else lane.squeeze(axis)
        for width in sorted({1 << (n - 1).bit_length(), *(n + -n % block for block in BLOCKS)} - {n}):
            added = lane * (width - n) / (n if node.name == "mean" else 1)
            text = f"{width - n} lanes beyond the end of {n} enter {node.expression}, and are not 0 there"
            yield named(node, "wrong_mask", 0.6, text, (RESULT, do(add_constant, other=added)), axis=axis, padded=width)


def _of_zero(graph: Graph, key: Key, value: Tensor, axis: int, depth: int) -> Tensor:
    """The value at a lane of zeros, of size 1 along that axis, which is counted from the end."""
    if value.dim() < -axis or value.shape[axis] == 1:
        return value  # the same for all lanes
    maker = graph.maker(key)
    if maker is None or depth == 0 or maker.name not in _ON_ELEMENTS or maker.func is None:
        return torch.zeros_like(value.narrow(axis, 0, 1))
    keys = iter(maker.makers)
    args = [_of_zero(graph, next(keys), a, axis, depth - 1) if isinstance(a, Tensor) else a for a in maker.args]
    return maker.func(*args, **maker.kwargs)
