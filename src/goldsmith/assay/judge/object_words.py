"""ObjectWords: words of Python objects in memory, by which many dicts and functions are compared at once.

A dict has a number that CPython changes with it, and a function the addresses of its parts. They are read without
touching the objects: a forked process shares their memory as long as nothing counts references to them, and asking a
function for its code calls every audit hook.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from ctypes import c_char

import torch
from torch import Tensor

PARTS = ("__code__", "__defaults__", "__kwdefaults__", "__closure__")
_WORD = 8  # bytes
_PIECE = 4096
# of this process, from its second word on, because torch takes address 0 for no memory
_MEMORY = torch.frombuffer((c_char * (1 << 56)).from_address(_WORD), dtype=torch.int64)
# as they are before any candidate, which may replace what these names stand for
_take, _equal, _list = torch.take, torch.equal, torch._C.TensorBase.tolist


class ObjectWords:
    """The words as they are when this is made. The objects must live as long."""

    def __init__(self, objects: Sequence[object], offset: int | None, count: int) -> None:
        """offset: bytes from an object's start to its words. None: unknown, and every object counts as changed."""
        self.size, self.places, self.known = len(objects), tuple[Tensor, ...](), list[Tensor]()
        if offset is not None:
            firsts = torch.tensor([_index(o, offset) for o in objects], dtype=torch.int64)
            # in pieces for which torch starts no thread, because the zygote must not have any
            self.places = (firsts.unsqueeze(1) + torch.arange(count)).split(_PIECE)
            self.known = [_take(_MEMORY, place) for place in self.places]

    def changed(self) -> list[int]:
        """Numbers of the objects whose words are others now."""
        if not self.places:
            return list(range(self.size))
        pieces = [(_take(_MEMORY, place), before) for place, before in zip(self.places, self.known, strict=True)]
        return [
            number * _PIECE + row
            for number, (now, before) in enumerate(pieces)
            if not _equal(now, before)
            for row, (words, known) in enumerate(zip(_list(now), _list(before), strict=True))
            if words != known
        ]


def of_dicts(dicts: Sequence[dict]) -> ObjectWords:
    """The number of each dict that changes with it."""
    return ObjectWords(dicts, _tag_offset(), 1)


def of_functions(functions: Sequence[types.FunctionType]) -> ObjectWords:
    """The addresses of each function's parts."""
    return ObjectWords(functions, _part_offset(), len(PARTS))


def of_cells(cells: Sequence[types.CellType]) -> ObjectWords:
    """The address of each cell's content."""
    return ObjectWords(cells, _cell_offset(), 1)


# how this Python lays out its objects, found out with examples


def _word(value: object, offset: int) -> int:
    return int(_MEMORY[_index(value, offset)])


def _index(value: object, offset: int) -> int:
    return (id(value) + offset) // _WORD - 1


def _tag_offset() -> int | None:
    """Where a dict has the number that changes with it: behind its head and its size."""
    offset, example = 3 * _WORD, {"name": object()}
    before = _word(example, offset)
    read = example["name"], _word(example, offset)
    example["name"] = object()
    return offset if before == read[1] != _word(example, offset) and sys.version_info < (3, 13) else None


def _part_offset() -> int | None:
    """Where a function has the addresses of its parts, one after the other."""
    known: Mapping[str, object] = {}

    def example(a: int = 1, *, b: int = 2) -> object:
        return known

    wanted = [id(getattr(example, part)) for part in PARTS]
    offsets = range(0, object.__sizeof__(example), _WORD)
    return next((o for o in offsets if [_word(example, o + n * _WORD) for n in range(len(wanted))] == wanted), None)


def _cell_offset() -> int | None:
    content = object()
    cell = types.CellType(content)
    return next((o for o in range(0, cell.__sizeof__(), _WORD) if _word(cell, o) == id(content)), None)
