"""Recorder: the steps of a candidate's run. A step is one operation of the source; a loop's turns are one step.

A step keeps the numbers of each of its results, and the steps that its operands came from. Memory says which: each
storage knows the steps that wrote to it.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .faulty_line import SourceLine

_MOST_STEPS = 20_000
_MOST_CALLS = 200_000
_MOST_PARTS = 256  # results of a step that are kept
_MOST_ELEMENTS = 8192  # of one result
Key = tuple[object, ...]
Place = tuple[Key | None, SourceLine | None]


class TooLong(Exception):
    """The run has more operations than a trace can hold."""


@dataclass
class TracedStep:
    """One operation of the candidate's source.

    at        None: an operation of torch or the assay that no line of the user's made
    parents   steps whose numbers it reads; loose: steps that only say where or whether (indices, pointers, masks)
    moves     it moves numbers and computes none
    parts     the numbers of each result, as one flat tensor in float64; last: (program -> its last part)
    coarse    the coarsest unit roundoff among its result and operands
    """

    number: int
    at: SourceLine | None
    operation: str
    moves: bool
    backward: bool = False
    parents: set[int] = field(default_factory=set)
    loose: set[int] = field(default_factory=set)
    parts: list[Tensor] = field(default_factory=list)
    last: dict[object, int] = field(default_factory=dict)
    calls: int = 0
    coarse: float = 0.0
    factory: bool = False
    numbers: list[int] = field(default_factory=list)  # of its calls among all of the run
    result: Tensor | None = None  # of its last call
    args: tuple = ()


@dataclass
class _Memory:
    """start, end: addresses; writers: steps that wrote to it; views: (offset, shape, stride) -> step of that value."""

    start: int
    end: int
    writers: set[int] = field(default_factory=set)
    views: dict[Key, int] = field(default_factory=dict)


class Recorder:
    """files: the user's. Operations outside of them are steps without a line, each a step of its own."""

    def __init__(self, files: Collection[str]):
        self.files = frozenset(files)
        self.steps: list[TracedStep] = []
        self.keys: dict[Key, int] = {}
        self.memories: dict[int, _Memory] = {}
        self.starts: list[int] = []
        self.alive: list[object] = []  # no address is used twice
        self.program: object = None
        self.calls = 0
        self.paused = False
        self.launches = 0

    def place(self) -> Place:
        """(key, line) of the nearest frame in the user's files."""
        frame = sys._getframe(2)
        key: list[object] = []
        at = None
        while frame is not None and len(key) < 8:
            code = frame.f_code
            if code.co_filename in self.files:
                if at is None:
                    at = SourceLine(code.co_filename, frame.f_lineno, code.co_name)
                key += [code.co_filename, frame.f_lineno, frame.f_lasti]
            frame = frame.f_back  # type: ignore[assignment]
        return (tuple(key), at) if at is not None else (None, None)

    def add(
        self, where: Place, operation: str, value: Tensor | None,
        parents: Iterable[int], loose: Iterable[int] = (), *, moves: bool = False, backward: bool = False,
        factory: bool = False, roundoff: float = 0.0,
    ) -> int:  # fmt: skip
        """Records one call; returns the number of its step."""
        self.calls += 1
        if self.calls > _MOST_CALLS or len(self.steps) > _MOST_STEPS:
            raise TooLong
        key, at = where
        number = self.keys.get((key, operation, backward)) if key is not None else None
        if number is None:
            number = len(self.steps)
            self.steps.append(TracedStep(number, at, operation, moves, backward, factory=factory))
            if key is not None:
                self.keys[key, operation, backward] = number
        step = self.steps[number]
        step.parents.update(parents)
        step.loose.update(loose)
        step.calls += 1
        read = max((self.steps[p].coarse for p in step.parents if p != number), default=0.0)
        step.coarse = max(step.coarse, roundoff, read)
        if value is not None and value.numel():
            flat = value.detach().reshape(-1)
            if flat.numel() > _MOST_ELEMENTS:
                picked = torch.linspace(0, flat.numel() - 1, _MOST_ELEMENTS).long()
                flat = flat[picked]
            at_most = len(step.parts) >= _MOST_PARTS
            if at_most:
                step.parts[-1] = flat.double()
            else:
                step.parts.append(flat.to(torch.float64, copy=True))
            step.last[self.program] = len(step.parts) - 1
        return number

    # memory

    def memory(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        memory = self.memories.get(start)
        if memory is None:
            memory = self.memories[start] = _Memory(start, start + storage.nbytes())
            bisect.insort(self.starts, start)
            self.alive.append(storage)
        return memory

    def read(self, tensor: Tensor) -> set[int]:
        """The steps that made the value of a tensor."""
        if not tensor.numel():
            return set()
        memory = self.memory(tensor)
        exact = memory.views.get(_view(tensor))
        return set(memory.writers) if exact is None else {exact}

    def read_at(self, address: int) -> set[int]:
        """The steps that wrote to the memory at an address."""
        at = bisect.bisect_right(self.starts, address) - 1
        if at < 0:
            return set()
        memory = self.memories[self.starts[at]]
        return set(memory.writers) if address < memory.end else set()

    def write_at(self, address: int, step: int) -> None:
        at = bisect.bisect_right(self.starts, address) - 1
        if at >= 0 and address < self.memories[self.starts[at]].end:
            memory = self.memories[self.starts[at]]
            memory.writers.add(step)
            memory.views.clear()

    def made(self, tensor: Tensor, step: int, *, written: bool = False) -> None:
        """The step made this tensor; written: in place, so that older views of its memory are no longer known."""
        if not tensor.numel():
            return
        memory = self.memory(tensor)
        if written:
            memory.views.clear()
        if written or not memory.writers:
            memory.writers.add(step)
        memory.views[_view(tensor)] = step


def _view(tensor: Tensor) -> Key:
    return (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
