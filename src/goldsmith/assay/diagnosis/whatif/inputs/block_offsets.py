"""Inputs that are read at the wrong position because the offset of a block, a group or half a byte is missing.

Kernels count positions from the start of their block and add the block's offset. Without the offset, every block reads
the first block. If the block's number is used as the position, the whole block reads one element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ..change import Change

_BLOCK_SIZES = (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, 128)
_MOST_ELEMENTS = 1 << 20
_EXCHANGE_CAUSES = ("permuted", "swapped_results")
Leaves = Mapping[str, Tensor]


def changes(leaves: Leaves) -> Iterator[Change]:
    inputs = {
        n: t for n, t in leaves.items() if t.numel() and t.numel() <= _MOST_ELEMENTS and not n.startswith("grad_")
    }
    for names, axis, n in _axes(inputs):
        for block in (b for b in _BLOCK_SIZES if b < n):
            yield from _in_blocks(names, axis, block)
    yield from _byte_halves([n for n, t in inputs.items() if t.dtype == torch.uint8])


def _axes(inputs: Leaves) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """(names, axis, length): every input alone, and inputs of one shape together, such as scales and zero points."""
    shapes: dict[torch.Size, list[str]] = {}
    for name, t in inputs.items():
        shapes.setdefault(t.shape, []).append(name)
        yield from (((name,), axis, n) for axis, n in enumerate(t.shape) if n > 2)
    for shape, names in shapes.items():
        if len(names) > 1:
            yield from ((tuple(names), axis, n) for axis, n in enumerate(shape) if n > 2)


def _in_blocks(names: tuple[str, ...], axis: int, block: int) -> Iterator[Change]:
    axis_text = f"axis {axis} of {' and '.join(names)}"
    params = {"operand": names[0], "input": names[0], "axis": axis, "block": block}
    prior = 0.47 - 0.01 * (len(names) > 1)
    text = f"along {axis_text} every block of {block} reads the first block: the block's offset is not added"
    yield Change("invalid_index", text, -1, None, params, prior, leaves=_read(names, axis, lambda i: i % block),
                 also=("wrong_stride", "wrong_factor"))  # fmt: skip
    text = f"along {axis_text} the number of the block of {block} is used as the position"
    yield Change("wrong_stride", text, -1, None, params, prior - 0.05,
                 leaves=_read(names, axis, lambda i: i // block), also=("invalid_index",))  # fmt: skip


def _read(names: tuple[str, ...], axis: int, place: Callable[[Tensor], Tensor]) -> Callable[[Leaves], Leaves]:
    def read(leaves: Leaves) -> Leaves:
        positions = torch.arange(leaves[names[0]].shape[axis], device=leaves[names[0]].device)
        return {n: leaves[n].index_select(axis, place(positions)) for n in names}

    return read


def _byte_halves(names: list[str]) -> Iterator[Change]:
    """Bytes of two four-bit numbers, with the low and the high number confused."""
    groups = [(n,) for n in names] + ([tuple(names)] if len(names) > 1 else [])
    for group in groups:
        joined = " and ".join(group)
        for text, rearrange, also in (
            ("low and high four bits of a byte are exchanged", lambda b: b % 16 * 16 + b // 16, _EXCHANGE_CAUSES),
            ("both numbers of a byte are its low four bits", lambda b: b % 16 * 17, ("wrong_stride",)),
            ("both numbers of a byte are its high four bits", lambda b: b // 16 * 17, ("wrong_stride",)),
        ):

            def bytes_of(current: Leaves, group: tuple[str, ...] = group, rearrange: Callable = rearrange) -> Leaves:
                return {n: rearrange(current[n]) for n in group}

            yield Change(
                "wrong_format", f"{text} of {joined}", -1, None, {"input": group[0]}, 0.5, leaves=bytes_of, also=also
            )
