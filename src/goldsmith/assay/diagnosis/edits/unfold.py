"""Windows over a padded axis, as `unfold` makes them: shifted by one place, or gradients stored instead of added.

window   w[t, j] = x[step t + j]
kernel   a loop over j: each tap reads its own unpadded rows, and adds to them in the backward
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ..graph.node import Node, maker_of
from ..graph.tensors import floating
from .golden_edit import CALL, RESULT, NamedEdit, do, named
from .primitives import windows as w
from .primitives.positions import reverse

_STEPS = ((1, "after it"), (-1, "before it"))
_ALSO = ("mask_shift", "off_by_one")
_TAPS = 64


def edits(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    if node.name == "unfold" and floating(node.args[0]) and 1 < node.args[2] <= _TAPS:
        yield from _windows(node, nodes)
    elif node.name == "unfold_backward" and floating(node.args[0]) and 1 < node.args[3] <= _TAPS:
        yield from _gradients(node)


def _windows(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    x, axis = node.args[0], node.args[1] % node.args[0].dim()
    before, behind = _padding(node, nodes, axis)
    for step, way in _STEPS:
        text = f"every window of {node.expression} reads the positions {way}"
        moved = 0, do(w.slide, axis=axis, step=step)
        yield named(node, "shifted", 0.5, text, moved, also=_ALSO, axis=axis, step=step)
        for around, how in ((True, "wrapping around"), (False, "its own at the end")) if node.args[3] == 1 else ():
            last = x.shape[axis] - behind
            taps = CALL, do(w.slide_taps, axis=axis, first=before, last=last, step=step, around=around)
            text = f"every tap of {node.expression} reads the positions {way}, {how}; its padding stays"
            yield named(node, "shifted", 0.45, text, taps, also=_ALSO, axis=axis, step=step)


def _padding(node: Node, nodes: Sequence[Node], axis: int) -> tuple[int, int]:
    """Numbers of padding places before and after the input."""
    x, maker = node.args[0], maker_of(nodes, node.makers[0])
    if maker is None or not isinstance(maker.out, Tensor) or maker.out.shape != x.shape:
        return 0, 0
    if maker.name == "constant_pad_nd":
        pads = list(maker.args[1])[2 * (x.dim() - 1 - axis) :][:2]
        return (max(pads[0], 0), max(pads[1], 0)) if len(pads) == 2 else (0, 0)
    if maker.name == "cat" and (maker.args[1] if len(maker.args) > 1 else 0) % x.dim() == axis:
        parts = [(t.shape[axis], not bool(t.any())) for t in maker.args[0] if t.numel()]
        ends = [n if empty else 0 for n, empty in (parts[0], parts[-1])] if len(parts) > 1 else [0, 0]
        return ends[0], ends[1]
    return 0, 0


def _gradients(node: Node) -> Iterator[NamedEdit]:
    expression, axis = node.expression, node.args[2]
    for which in ("last", "first"):
        text = f"{expression} stores where it should add: of the taps that reach a position the {which} is left"
        stored = CALL, do(w.store_taps, last=which == "last")
        yield named(node, "overwritten_accumulator", 0.7, text, stored, also=("lost_update", "missing_term"),
                    left=which)  # fmt: skip
    for at, which in ((-1, "last"), (0, "first")):
        without = 0, do(w.zero_place, axis=-1, at=at)
        text = f"{expression} leaves out the {which} tap"
        yield named(node, "off_by_one", 0.65, text, without, also=("truncated_reduction",), tap=at % node.args[3])
    backwards = 0, do(reverse, axis=-1)
    yield named(node, "permuted", 0.6, f"{expression} takes the taps in reverse order", backwards)
    for step, way in _STEPS:
        text = f"{expression} gives every position the gradient of the one {way}"
        slid = RESULT, do(w.slide, axis=axis, step=step)
        yield named(node, "shifted", 0.5, text, slid, also=_ALSO, step=step)
