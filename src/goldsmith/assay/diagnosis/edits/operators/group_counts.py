"""Divisions by the size of each group: by one number for all groups instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Node
from ..golden_edit import NamedEdit, do, named
from ..primitives.formulas import applied
from ..primitives.tensors import constant

_LENGTHS = 12


def edits(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    if node.name in ("div", "div_") and len(node.args) > 1 and _counts(node.args[1]):
        yield from _divided(node, nodes)


def _counts(value: Any) -> bool:
    """Whether it holds integers from 1 up that are not all equal: the size of each group."""
    if not isinstance(value, Tensor) or value.numel() < 2 or value.dtype == torch.bool:
        return False
    return bool(((value == value.round()) & (value >= 1)).all()) and bool((value != value.flatten()[0]).any())


def _divided(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    """Divided by the length of some axis in the golden, or by the largest count."""
    name = node.operand(1) or "a count"
    lengths = Counter(n for other in nodes for t in other.tensors for n in t.shape if n > 1)
    for n, _ in lengths.most_common(_LENGTHS):
        text = f"{node.expression} is divided by {n}, not by each group's {name}"
        yield named(node, "wrong_factor", 0.6, text, (1, do(constant, new=n)), factor=name, by=n)
    text = f"{node.expression} is divided by the largest of {name}"
    yield named(node, "wrong_factor", 0.5, text, (1, do(applied, of=torch.amax)), factor=name)
