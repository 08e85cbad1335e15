"""Prefix sums, products and logsumexps that a kernel takes in blocks, and sums whose remainder is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..graph.node import Node
from ..graph.tensors import floating
from .golden_edit import CALL, NamedEdit, do, named
from .primitives.repartitions import (
    NEUTRAL,
    scan_backwards,
    scan_blocks,
    scan_exclusive,
    scan_rounds,
    scan_window,
)
from .primitives.spans import BLOCKS


def edits(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    if node.name not in NEUTRAL or len(node.args) < 2 or not floating(node.args[0]) or not node.args[0].dim():
        return
    axis, expression = node.args[1] % node.args[0].dim(), node.expression
    n = node.args[0].shape[axis]
    for block in (b for b in (2, 4, *BLOCKS) if b < n):
        params = {"axis": axis, "block": block}
        for first in (0, 1):  # the initial value may precede the first block
            afresh = CALL, do(scan_blocks, axis=axis, block=block, first=first, carry=False)
            yield named(node, "missing_term", 0.6, f"{expression} restarts in every block of {block}", afresh,
                        also=("truncated_reduction", "overwritten_accumulator"), **params)  # fmt: skip
            text = f"each block of {block} of {expression} carries over only the previous block's own total"
            carried = CALL, do(scan_blocks, axis=axis, block=block, first=first, carry=True)
            yield named(node, "overwritten_accumulator", 0.6, text, carried,
                        also=("truncated_reduction", "missing_term"), **params)  # fmt: skip
        also = ("off_by_one", "missing_term")
        text = f"{expression} covers only the last {block} positions: the scan misses its last rounds"
        window = CALL, do(scan_window, axis=axis, width=block)
        yield named(node, "truncated_reduction", 0.55, text, window, also=also, axis=axis, reach=block)
        text = f"each block of {block} of {expression} misses the last round: terms {block // 2} or more positions back"
        for first in (0, 1) if block > 2 else ():
            rounds = CALL, do(scan_rounds, axis=axis, block=block, first=first)
            yield named(node, "truncated_reduction", 0.55, text, rounds, also=also, **params)
    if n > 1:
        text = f"{expression} is exclusive: each position leaves out its own number"
        exclusive = CALL, do(scan_exclusive, axis=axis)
        yield named(node, "off_by_one", 0.6, text, exclusive, also=("shifted",), axis=axis)
        text = f"{expression} runs from the end to the start"
        yield named(node, "permuted", 0.5, text, (CALL, do(scan_backwards, axis=axis)), also=("transposed",), axis=axis)
