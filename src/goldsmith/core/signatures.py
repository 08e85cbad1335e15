"""What was found out about a call, kept for the next call of the same signature.

A signature is what a call has apart from its numbers and addresses: shapes, dtypes, devices, options. Checking the
arguments, choosing a backend and finding a compiled kernel take longer than a small kernel runs, and all three depend
on the signature alone.

So does everything else that a backend does, if it only allocates memory and launches kernels. `repeated` records both
at a call and repeats them at later calls without the backend's Python code.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .tracing import tracing

MOST = 4096  # signatures that are kept; a process that has more starts again
_SIMPLE = frozenset((bool, int, float, str, type(None)))

Value = TypeVar("Value")


def signature(
    op: Hashable, backend: str, tensors: Sequence[Tensor | None], options: Mapping[str, object]
) -> Hashable | None:
    """The signature of an operator's call with plain tensors; None if an argument is of an unusual type.

    1, 1.0 and True are equal, but a check tells them apart, so the types of the options are a part.
    """
    types = (type(backend), *map(type, options.values()))
    if not _SIMPLE.issuperset(types):
        return None
    try:
        parts = [None if t is None else (t.shape, t.dtype, t.device, t.layout) for t in tensors]
    except RuntimeError:  # a nested tensor has no shape
        return None
    return op, backend, types, tuple(options.items()), tuple(parts)


def keep(table: dict[Hashable, Value], key: Hashable | None, value: Value) -> Value:
    """Remembers the value for a signature, unless that is None; returns the value."""
    if key is not None:
        if len(table) >= MOST:
            table.clear()
        table[key] = value
    return value


ALIGNMENT = 512  # bytes, as torch aligns what it allocates on a GPU
MOST_BYTES = 2**24  # of a repeated call, which frees its memory at its end only; the device takes longer on larger ones
PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))  # torch's own tensors, or none
_EMPTY = frozenset(getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "new_empty"))
_thread = threading.local()
Results: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch: `start(*grid, stream, *fixed, *addresses, *values)`, with the pointers that it had when recorded."""

    start: Callable[..., object]
    grid: tuple[int, int, int]
    fixed: tuple[object, ...]
    pointers: tuple[Tensor, ...]
    values: tuple[object, ...]
    settings: tuple[object, ...]  # what it depended on apart from its arguments, and
    now: Callable[[], tuple[object, ...]]  # what another would depend on
    stream: Callable[[], int]


class Recording(TorchDispatchMode):
    """What a call does: its launches, the memory that it allocates, and whether it does anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.memory, self.repeatable = list[RecordedLaunch](), list[Tensor](), True

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _EMPTY and result.is_contiguous():
            self.memory.append(result)
        elif not all(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            self.repeatable = False  # not a view
        return result

    def __enter__(self) -> Recording:
        self.before, _thread.recording = recording(), self
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _thread.recording = self.before


def recording() -> Recording | None:
    """The recording of this thread's call, to which every launch must be added."""
    return getattr(_thread, "recording", None)


class Repetition:
    """The launches of a call, for other tensors of the same signature."""

    def __init__(
        self, launches: list[RecordedLaunch], sources: list[int], other: list[Tensor], results: Results
    ) -> None:
        """sources: the addresses of the inputs, in their order; other: memory of the call that is not a result."""
        memory = [t.data_ptr() for t in (*results, *other)]
        index = {address: i for i, address in enumerate([*sources, *memory, 0])}
        self.results = [(r.shape, r.dtype, r.device) for r in results]
        self.places, self.room, self.device = list[int](), 0, results[0].device
        for t in other:  # parts of one allocation, which takes as long as each of them
            self.places.append(self.room)
            self.room += -(-t.numel() * t.element_size() // ALIGNMENT) * ALIGNMENT
        self.settings, self.now, self.stream = launches[0].settings, launches[0].now, launches[0].stream
        self.launches = [
            (a.start, a.grid, a.fixed, [index[p.data_ptr()] for p in a.pointers], a.values) for a in launches
        ]

    def __call__(self, addresses: list[int]) -> Results:
        results = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in self.results]
        addresses += [r.data_ptr() for r in results]
        if self.room:
            room = torch.empty(self.room, dtype=torch.uint8, device=self.device)
            begin = room.data_ptr()
            addresses += [begin + place for place in self.places]
        addresses.append(0)  # of a tensor without elements
        stream = self.stream()
        for start, grid, fixed, places, values in self.launches:
            start(*grid, stream, *fixed, *[addresses[i] for i in places], *values)
        return tuple(results)


_repetitions: dict[Hashable, Repetition | None] = {}


def repeated(what: Hashable, tensors: Sequence[Tensor | None], compute: Callable[[], Results]) -> Results:
    """compute(), or the launches of an earlier compute() of the same `what` for tensors of the same signature.

    compute may only depend on `what` and on the tensors. It must launch with `run` (core/_kernels) alone.
    """
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    if modes or tracing() or not PLAIN.issuperset(map(type, tensors)):
        return compute()
    try:
        given = [t for t in tensors if t is not None]
        addresses = [t.data_ptr() for t in given]
        parts = [None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.is_neg()) for t in tensors]
    except RuntimeError:  # a sparse tensor
        return compute()
    if 0 in addresses:
        return compute()
    key = (what, tuple(parts), tuple([a % 16 for a in addresses]))
    known = _repetitions.get(key)
    if known is not None:
        return known(addresses) if known.now() == known.settings else compute()
    if key in _repetitions or len(set(addresses)) < len(addresses):
        return compute()
    with Recording() as record:
        results = compute()
    keep(_repetitions, key, _repetition(record, given, results))
    return results


def _repetition(record: Recording, given: list[Tensor], results: Results) -> Repetition | None:
    """The launches of a record, unless it did anything that other launches would not repeat."""
    allocated, filled = [m for m in record.memory if m.numel()], [r for r in results if r.numel()]
    memory, launches = {m.data_ptr(): m for m in allocated}, record.launches
    sources = [t.data_ptr() for t in given]
    pairs = [(memory.get(r.data_ptr()), r) for r in filled]
    known = memory.keys() | {0, *sources}
    possible = (
        record.repeatable
        and launches
        and len(memory) == len(allocated)
        and all(address % 16 == 0 for address in memory)
        and not any(t.is_neg() for t in given)
        and len({launch.settings for launch in launches}) == 1
        and len({r.data_ptr() for r in filled}) == len(filled)
        and all(m is not None and (m.numel(), m.dtype) == (r.numel(), r.dtype) and r.is_contiguous() for m, r in pairs)
        and all(p.data_ptr() in known for launch in launches for p in launch.pointers)
        and math.fsum(m.numel() * m.element_size() for m in allocated) <= MOST_BYTES
        and len({t.device for t in (*allocated, *results)}) == 1
    )
    of_results = {r.data_ptr() for r in filled}
    other = [m for m in allocated if m.data_ptr() not in of_results]
    return Repetition(launches, sources, other, results) if possible else None
