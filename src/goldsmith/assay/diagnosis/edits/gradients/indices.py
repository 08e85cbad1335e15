"""Addresses in the backward are computed with another stride.

Also here: an entry that belongs to one block, such as a label's, appears in every block; and the first or last entry of
each group counts for the neighbouring group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ...graph.graph import Graph
from ...graph.node import Node
from ...graph.tensors import floating, whole
from ..golden_edit import RESULT, Action, GoldenEdit, NamedEdit, Part, do, named
from ..primitives.positions import other_rows, repeat_block, shift_owners

_BLOCKS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, 128)
_CHECKED = frozenset("index index_put gather scatter scatter_add index_select index_add".split())
_SPARSE = frozenset(
    "diagonal_backward scatter scatter_add index_put nll_loss_backward nll_loss2d_backward select_backward".split()
)
_OWNERS = (
    ("before", "the first entry of each group counts for the previous group"),
    ("before, wrapping around",
     "the first entry of each group counts for the previous group, and that of the first group for the last"),
    ("after", "the last entry of each group counts for the next group"),
)  # fmt: skip


def edits(graph: Graph, numbers: Mapping[str, object]) -> Iterator[NamedEdit]:
    for node in graph.nodes:
        if node.index in graph.behind:
            yield from _strides(node, numbers)
    yield from _tiled(graph)
    yield from _owners(graph)


def _strides(node: Node, numbers: Mapping[str, object]) -> Iterator[NamedEdit]:
    """Positions in a flattened table: row * S + column in place of the golden's row * W + column."""
    sizes = {int(n) for n in numbers.values() if isinstance(n, int) and not isinstance(n, bool) and 1 < n <= 4096}
    sizes |= {s for t in node.tensors for s in t.shape[-3:] if s > 1}
    for i, a in enumerate(node.args):
        if not whole(a) or a.numel() < 3 or not int(a.max()) or int(a.min()) < 0:
            continue
        for old in sorted(s for s in sizes if s <= int(a.max())):
            for new in sorted(sizes - {old}):
                if int(other_rows(a, old=old, new=new).max()) <= max(int(a.max()), _last(node)):
                    text = f"positions in {node.expression} are computed with rows of {new}, not of {old}"
                    yield named(node, "wrong_stride", 0.5, text, (i, do(other_rows, old=old, new=new)),
                                also=("permuted", "invalid_index"), stride=new, golden_stride=old)  # fmt: skip


def _last(node: Node) -> int:
    """The last valid place; not all operators refuse a place beyond it."""
    if node.name in _CHECKED:
        return max(t.numel() for t in node.tensors) - 1
    if node.name == "max_pool2d_with_indices_backward":
        return node.out.shape[-2] * node.out.shape[-1] - 1
    return 0


def _tiled(graph: Graph) -> Iterator[NamedEdit]:
    alike: dict[tuple, list[Node]] = {}
    for node in graph.nodes:
        sparse = node.backward and node.index in graph.behind and node.name in _SPARSE and floating(node.out)
        if sparse and node.out.dim() >= 1 and float((node.out != 0).double().mean()) <= 0.5:
            alike.setdefault((node.name, tuple(node.out.shape)), []).append(node)
    for members in alike.values():
        shape = members[0].out.shape
        sets = [(a,) for a in range(len(shape))] + ([(len(shape) - 2, len(shape) - 1)] if len(shape) > 1 else [])
        for axes in sets:
            for block in (b for b in _BLOCKS if b < min(shape[a] for a in axes)):
                where = " and ".join(map(str, axes))
                text = f"the first block of {block} of {members[0].expression} is repeated in every block, axis {where}"
                repeat = do(repeat_block, axes=axes, block=block)
                edit = GoldenEdit(tuple(Action(n.index, RESULT, repeat) for n in members), members[0].line)
                yield NamedEdit("invalid_index", text, edit, 0.5, {"axis": axes[-1], "block": block},
                                ("wrong_mask", "repeated_term"))  # fmt: skip


def _owners(graph: Graph) -> Iterator[NamedEdit]:
    """Sorted group indices that are moved by one: the first entry of each group counts for the previous group, or the
    last entry for the next.

    The first entry of the first group stays there, or wraps around to the last group.
    """
    groups: dict[tuple, list[tuple[Node, Part]]] = {}
    for node in graph.nodes:
        for i, a in enumerate(node.args if node.backward and node.index in graph.behind else ()):
            listed: list[tuple[Part, Any]] = [((i, j), b) for j, b in enumerate(a)] if isinstance(a, list) else []
            for part, index in listed or [(i, a)]:
                if whole(index) and _sorted(index):
                    groups.setdefault(tuple(index.tolist()), []).append((node, part))
    for owner, members in groups.items():
        for rule, text in _OWNERS if len(set(owner)) > 1 else ():
            actions = []
            for node, part in members:
                rows = next(a.shape[0] for a in node.args if floating(a) and a.dim())
                actions.append(Action(node.index, part, do(shift_owners, rule=rule, groups=rows)))
            first = members[0][0]
            yield NamedEdit("off_by_one", f"in {first.expression} {text}", GoldenEdit(tuple(actions), first.line), 0.5,
                            {}, ("shifted", "invalid_index"))  # fmt: skip


def _sorted(index: Tensor) -> bool:
    return index.dim() == 1 and len(index) > 2 and bool((index.diff() >= 0).all())
