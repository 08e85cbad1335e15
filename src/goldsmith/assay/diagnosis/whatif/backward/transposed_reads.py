"""Addresses in the backward are computed with another stride.

Also here: an entry that belongs to one block, such as a label's, appears in every block; and the first or last entry of
each group counts for the neighbouring group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...graph.node import Changed, Node
from ...graph.tensors import floating, whole
from ..change import Change, with_arguments, with_result
from .block_sums import BLOCKS

_CHECKED = frozenset("index index_put gather scatter scatter_add index_select index_add".split())
_SPARSE = frozenset(
    "diagonal_backward scatter scatter_add index_put nll_loss_backward nll_loss2d_backward select_backward".split()
)


def changes(calls: Sequence[Node], among: set[int], numbers: Mapping[str, object]) -> Iterator[Change]:
    for call in calls:
        if call.index in among:
            yield from _strides(call, numbers)
    yield from _tiled(calls, among)
    yield from _owners(calls, among)


def _strides(call: Node, numbers: Mapping[str, object]) -> Iterator[Change]:
    """Places of a flattened table: row S + column, where the golden has row W + column."""
    sizes = {int(n) for n in numbers.values() if isinstance(n, int) and not isinstance(n, bool) and 1 < n <= 4096}
    sizes |= {s for t in call.tensors for s in t.shape[-3:] if s > 1}
    for i, a in enumerate(call.args):
        if not whole(a) or a.numel() < 3 or not int(a.max()) or int(a.min()) < 0:
            continue
        for old in sorted(s for s in sizes if s <= int(a.max())):
            for new in sorted(sizes - {old}):
                places = a // old * new + a % old
                if int(places.max()) > max(int(a.max()), _last(call)):
                    continue
                change = with_arguments(lambda args, i=i, p=places: (*args[:i], p, *args[i + 1 :]))
                text = f"positions in {call.expression} are computed with rows of {new}, not of {old}"
                yield Change("wrong_stride", text, call.index, change, {"stride": new, "golden_stride": old}, 0.5,
                             also=("permuted", "invalid_index"))  # fmt: skip


def _last(call: Node) -> int:
    """The last valid place; not all operators refuse a place beyond it."""
    if call.name in _CHECKED:
        return max(t.numel() for t in call.tensors) - 1
    if call.name == "max_pool2d_with_indices_backward":
        return call.out.shape[-2] * call.out.shape[-1] - 1
    return 0


def _tiled(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    alike: dict[tuple, list[Node]] = {}
    for call in calls:
        sparse = call.backward and call.index in among and call.name in _SPARSE and floating(call.out)
        if sparse and call.out.dim() >= 1 and float((call.out != 0).double().mean()) <= 0.5:
            alike.setdefault((call.name, tuple(call.out.shape)), []).append(call)
    for members in alike.values():
        shape = members[0].out.shape
        axes = [(a,) for a in range(len(shape))] + ([(len(shape) - 2, len(shape) - 1)] if len(shape) > 1 else [])
        for over in axes:
            for block in (b for b in BLOCKS if b < min(shape[a] for a in over)):
                where = " and ".join(map(str, over))
                text = f"the first block of {block} of {members[0].expression} is repeated in every block, axis {where}"
                group = tuple((c.index, _repeated(over, block)) for c in members)
                yield Change("invalid_index", text, group[0][0], group[0][1], {"axis": over[-1], "block": block}, 0.5,
                             group=group if len(group) > 1 else (), also=("wrong_mask", "repeated_term"))  # fmt: skip


def _repeated(over: tuple[int, ...], block: int) -> Changed:
    def repeated(out: Tensor) -> Tensor:
        for axis in over:
            out = out.index_select(axis, torch.arange(out.shape[axis], device=out.device) % block)
        return out

    return with_result(repeated)


def _owners(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    """Changes of sorted group indices: the first entry of each group counts for the previous group, or the last entry
    for the next.

    The first entry of the first group stays there, or wraps around to the last group.
    """
    groups: dict[tuple, list[tuple[Node, int | None, int]]] = {}
    for call in calls:
        if not call.backward or call.index not in among:
            continue
        for i, a in enumerate(call.args):
            for place, index in enumerate(a) if isinstance(a, list | tuple) else ((None, a),):
                if whole(index) and index.dim() == 1 and len(index) > 2 and bool((index.diff() >= 0).all()):
                    groups.setdefault((tuple(index.tolist()),), []).append((call, place, i))
    for (owner,), members in groups.items():
        if len(set(owner)) < 2:
            continue
        for move, text in (
            (lambda x, n: torch.cat((x[:1], x[:-1])), "the first entry of each group counts for the previous group"),
            (lambda x, n: torch.cat((x.new_tensor([n - 1]), x[:-1])),
             "the first entry of each group counts for the previous group, and that of the first group for the last"),
            (lambda x, n: torch.cat((x[1:], x[-1:])), "the last entry of each group counts for the next group"),
        ):  # fmt: skip
            group = tuple((c.index, with_arguments(_with_index(i, place, move))) for c, place, i in members)
            text = f"in {members[0][0].expression} {text}"
            yield Change("off_by_one", text, group[0][0], group[0][1], {}, 0.5,
                         group=group if len(group) > 1 else (), also=("shifted", "invalid_index"))  # fmt: skip


def _with_index(i: int, place: int | None, move: Callable[[Tensor, int], Tensor]) -> Callable[[tuple], tuple]:
    def put(args: tuple) -> tuple:
        rows = next(a.shape[0] for a in args if isinstance(a, Tensor) and floating(a) and a.dim())
        if place is None:
            return (*args[:i], move(args[i], rows), *args[i + 1 :])
        listed = [move(a, rows) if j == place else a for j, a in enumerate(args[i])]
        return (*args[:i], listed, *args[i + 1 :])

    return put
