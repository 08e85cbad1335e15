"""Inputs that are looked up at the wrong place because the offset of a block, a group or a byte is missing.

Kernels count places from the start of their block and add the block's offset. If the offset is forgotten, every block
reads the first one. If the block's number is used alone, all places of a block read the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ..run.calls import Change

_BLOCKS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, 128)
_NUMBERS = 1 << 20
_SWAPPED = ("permuted", "swapped_results")
Leaves = Mapping[str, Tensor]


def changes(leaves: Leaves) -> Iterator[Change]:
    inputs = {n: t for n, t in leaves.items() if t.numel() and t.numel() <= _NUMBERS and not n.startswith("grad_")}
    for names, axis, n in _axes(inputs):
        for block in (b for b in _BLOCKS if b < n):
            yield from _in_blocks(names, axis, block)
    yield from _halves([n for n, t in inputs.items() if t.dtype == torch.uint8])


def _axes(inputs: Leaves) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Every axis of every input, and inputs of one shape together, as scales and zero points are."""
    shapes: dict[torch.Size, list[str]] = {}
    for name, t in inputs.items():
        shapes.setdefault(t.shape, []).append(name)
        yield from (((name,), axis, n) for axis, n in enumerate(t.shape) if n > 2)
    for shape, names in shapes.items():
        if len(names) > 1:
            yield from ((tuple(names), axis, n) for axis, n in enumerate(shape) if n > 2)


def _in_blocks(names: tuple[str, ...], axis: int, block: int) -> Iterator[Change]:
    of = f"axis {axis} of {' and '.join(names)}"
    params = {"operand": names[0], "input": names[0], "axis": axis, "block": block}
    prior = 0.47 - 0.01 * (len(names) > 1)
    text = f"along {of} every block of {block} reads the first one: its offset is not added"
    yield Change("invalid_index", text, -1, None, params, prior, leaves=_read(names, axis, lambda i: i % block),
                 also=("wrong_stride", "wrong_factor"))  # fmt: skip
    text = f"along {of} the number of its block of {block} is used as the place"
    yield Change("wrong_stride", text, -1, None, params, prior - 0.05,
                 leaves=_read(names, axis, lambda i: i // block), also=("invalid_index",))  # fmt: skip


def _read(names: tuple[str, ...], axis: int, place: Callable[[Tensor], Tensor]) -> Callable[[Leaves], Leaves]:
    def read(now: Leaves) -> Leaves:
        own = torch.arange(now[names[0]].shape[axis], device=now[names[0]].device)
        return {n: now[n].index_select(axis, place(own)) for n in names}

    return read


def _halves(names: list[str]) -> Iterator[Change]:
    """Two four-bit numbers in a byte, with the low one taken for the high one."""
    groups = [(n,) for n in names] + ([tuple(names)] if len(names) > 1 else [])
    for some in groups:
        joined = " and ".join(some)
        for text, other, also in (
            ("low and high four bits of a byte are exchanged", lambda b: b % 16 * 16 + b // 16, _SWAPPED),
            ("both numbers of a byte are its low four bits", lambda b: b % 16 * 17, ("wrong_stride",)),
            ("both numbers of a byte are its high four bits", lambda b: b // 16 * 17, ("wrong_stride",)),
        ):

            def bytes_of(now: Leaves, some: tuple[str, ...] = some, other: Callable = other) -> Leaves:
                return {n: other(now[n]) for n in some}

            yield Change(
                "wrong_format", f"{text} of {joined}", -1, None, {"input": some[0]}, 0.5, leaves=bytes_of, also=also
            )
