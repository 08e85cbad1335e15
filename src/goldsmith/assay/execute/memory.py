"""Arena: memory for a candidate's tensors, with guard bands, poisoned bodies and a choice of layouts.

Every buffer is `band | body | band`, with the body aligned to 256 bytes (Triton compiles another kernel for less).
Bands of floating-point tensors hold a NaN that arithmetic does not produce, another for each buffer (memory_marks.py).
A stray read shows in the results, a stray write in the band's bytes, even if it copies the band of another buffer.
`Poison` puts guard bands around every tensor that the candidate creates with `torch.empty*`, `zeros*`, `ones*` or
`full*`, forward and backward. It fills `empty*` with another such NaN, so that unwritten elements are recognised.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..support.device_flags import Flag
from ..support.dispatch_mode import DispatchMode
from .memory_marks import DIRT_FILL, NAN_FILL, band_mark, clears_caches, fill_body, wide, zero_mark

ALIGN = 256
BAND_MIN, BAND_MAX = 1024, 1 << 20
# Used instead of NaN, because comparisons swallow NaN. Signs alternate; sums and products do not overflow.
LARGE = {torch.float16: 2.0**13, torch.bfloat16: 2.0**20, torch.float32: 2.0**20, torch.float64: 2.0**20}
LAYOUTS = ("transposed", "stepped", "sliced")
SCRATCH = "scratch buffer"


@dataclass(frozen=True)
class Overrun:
    """A write outside a buffer: `distance` bytes from its nearest edge to the farthest byte written."""

    label: str
    side: str
    bytes: int
    distance: int
    body: int

    @property
    def text(self) -> str:
        where = {"past": "past the end", "before": "before the start", "gap": "between the elements"}[self.side]
        text = f"{self.bytes} bytes written {where} of {self.label} ({self.body} bytes)"
        if self.side == "past" and self.body and self.distance == self.body:
            return text + ": exactly twice the buffer"
        return text + (f", up to {self.distance} bytes away" if self.side != "gap" else "")


@dataclass
class Buffer:
    """One allocation with guard bands: `raw` bytes, of which [start, start + size) belong to `tensor`."""

    raw: Tensor
    start: int
    size: int
    tensor: Tensor
    label: str
    mark: int  # value of each `unit` in its bands
    unit: torch.dtype
    before: Tensor | None = None
    snapshot: Tensor | None = None  # for `written_within`; early, because an allocation may wait for a GPU's streams

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage begins within this allocation."""
        try:
            at = tensor.untyped_storage().data_ptr()
        except NotImplementedError:  # torch.func's tensors have no storage of their own
            return False
        return 0 <= at - self.raw.data_ptr() < len(self.raw)

    def untouched(self) -> Flag:
        """False if `overrun` has to look. It needs no wait for a GPU; on a CPU `overrun` is as fast."""
        if not self.raw.is_cuda:
            return False
        if self.before is not None:
            return (self.raw == self.before).all()
        bands = (self.raw[: self.start], self.raw[self.start + self.size :])
        return torch.cat(bands).view(self.unit).eq(self.mark).all()

    def overrun(self) -> Overrun | None:
        """The write outside the body, or None."""
        mark, unit = self.mark, self.unit
        for side, part in (("past", slice(self.start + self.size, None)), ("before", slice(0, self.start))):
            different = self.raw[part].view(unit) != (mark if self.before is None else self.before[part].view(unit))
            if bool(different.any()):
                touched = different.nonzero().flatten()
                distance = int(touched[-1]) + 1 if side == "past" else len(different) - int(touched[0])
                return Overrun(self.label, side, len(touched) * unit.itemsize, distance * unit.itemsize, self.size)
        return self._gap()

    def _gap(self) -> Overrun | None:
        if self.before is None or self.tensor.is_contiguous() or torch.equal(self.raw, self.before):
            return None
        gap = torch.ones(self.size // self.tensor.element_size(), dtype=torch.bool, device=self.raw.device)
        gap.as_strided(self.tensor.shape, self.tensor.stride()).fill_(False)
        body = slice(self.start, self.start + self.size)
        changed = (self.raw[body] != self.before[body]).view(len(gap), -1).any(-1) & gap
        count = int(changed.sum()) * self.tensor.element_size()
        return Overrun(self.label, "gap", count, 0, self.size) if count else None

    def kept(self) -> Flag:
        """Whether the bytes of all elements are those of `before`. It needs no wait for a GPU."""
        if self.before is None or (not self.raw.is_cuda and torch.equal(self.raw, self.before)):
            return True
        fine = ~self._changes(self.before).any()
        return fine if fine.is_cuda else bool(fine)

    def changed(self) -> Tensor | None:
        """Mask of the elements whose bytes changed, or None."""
        return None if self.before is None or self.kept() else self._changes(self.before)

    def _changes(self, before: Tensor) -> Tensor:
        body = slice(self.start, self.start + self.size)
        different = (self.raw[body] != before[body]).view(-1, self.tensor.element_size()).any(-1)
        return different.as_strided(self.tensor.shape, self.tensor.stride())


class Arena:
    """The buffers of one run; `watched` prepares them for `written_within`, after the forward has returned."""

    def __init__(self, fill: str = NAN_FILL, neighbour_sign: int = 0, *, watched: bool = False):
        self.fill, self.neighbour_sign, self.watched = fill, neighbour_sign, watched
        self.buffers: list[Buffer] = []
        self.allocated = 0  # number of buffers that the candidate allocated
        self.inputs: dict[str, Buffer] = {}

    def allocate(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, label: str,
        shift: int = 0, *, at_storage_start: bool = False, for_input: bool = False,
    ) -> Buffer:  # fmt: skip
        """A new buffer between guard bands, whose first element lies `shift` elements after an aligned address.

        at_storage_start: storage_offset is 0, as for `torch.empty`; `as_strided` cannot reach the band before the body.
        for_input: the buffer is for an input or an output gradient.
        """
        item_bytes = dtype.itemsize
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
        size = span * item_bytes
        reach = max(size, math.prod(shape) * item_bytes)  # a kernel may treat an expanded tensor as dense
        band = min(max(BAND_MIN, -(-reach // ALIGN) * ALIGN), BAND_MAX)
        mark, unit = band_mark(dtype, len(self.inputs) if for_input else self.allocated, for_input)
        if self.fill == DIRT_FILL and not for_input and wide(dtype):
            mark, unit = zero_mark(dtype)
        self.allocated += not for_input
        total_bytes = size + 2 * band + ALIGN + shift * item_bytes
        raw = torch.full((total_bytes // unit.itemsize,), mark, dtype=unit, device=device).view(torch.uint8)
        start = band + (-(raw.data_ptr() + band)) % ALIGN + shift * item_bytes
        self._fill_with_large_numbers(raw, dtype)
        fill_body(raw[start : start + size], dtype, self.fill)
        storage, offset = raw.untyped_storage(), start // item_bytes
        if at_storage_start:
            storage, offset = storage[start:], 0  # shares and keeps alive the same memory
        tensor = torch.empty(0, dtype=dtype, device=device)
        tensor.set_(storage, offset, tuple(shape), tuple(stride))
        before, snapshot = raw.clone() if self.neighbour_sign else None, torch.empty_like(raw) if self.watched else None
        self.buffers.append(Buffer(raw, start, size, tensor, label, mark, unit, before, snapshot))
        return self.buffers[-1]

    def _fill_with_large_numbers(self, raw: Tensor, dtype: torch.dtype) -> None:
        if self.neighbour_sign and dtype in LARGE:
            numbers = raw.view(dtype)
            numbers[0::2], numbers[1::2] = self.neighbour_sign * LARGE[dtype], -self.neighbour_sign * LARGE[dtype]

    def place(self, name: str, value: Tensor, layout: str | None = None) -> Tensor:
        """A copy between guard bands of an input or output gradient in a layout; None keeps its strides."""
        value = value.detach()
        stride, shift = strides_for(value, layout)
        buffer = self.allocate(value.shape, stride, value.dtype, value.device, name, shift, for_input=True)
        if value.numel():
            body = buffer.raw[buffer.start : buffer.start + buffer.size]
            body.view(buffer.unit).fill_(buffer.mark)  # gaps between elements get the mark of the bands
            self._fill_with_large_numbers(buffer.raw, value.dtype)
            own = distinct(buffer.tensor)
            own.copy_(value.as_strided(own.shape, value.stride()) if own.shape != value.shape else value)
        buffer.before = buffer.raw.clone()
        self.inputs[name] = buffer
        return buffer.tensor

    def written_within(self, seconds: float) -> int:
        """Number of bytes that change within `seconds`, while the assay writes nothing; a GPU is synchronised first."""
        pairs = [(b.raw, b.snapshot.copy_(b.raw)) for b in self.buffers if b.snapshot is not None]
        time.sleep(seconds)
        if any(now.is_cuda for now, _ in pairs):
            torch.cuda.synchronize()
        return sum(int((now != old).sum()) for now, old in pairs)

    def overruns(self) -> list[Overrun]:
        return [o for b in self.buffers if (o := b.overrun()) is not None]

    def owner(self, tensor: Tensor) -> Buffer | None:
        """The buffer of this arena that holds a tensor, or None."""
        return next((b for b in self.buffers if b.holds(tensor)), None)

    def name(self, results: Mapping[str, Tensor]) -> None:
        """Labels the scratch buffers that hold results with the names of the results."""
        for buffer in self.buffers:
            names = [n for n, t in results.items() if t.numel() and buffer.holds(t)]
            if names and buffer.label.startswith(SCRATCH):
                buffer.label = ", ".join(names)

    def forget(self, buffer: Buffer) -> None:
        """Stops checking the bands of a buffer."""
        self.buffers = [b for b in self.buffers if b is not buffer]


def distinct(tensor: Tensor) -> Tensor:
    """A view without stride-0 repetitions, so that each byte is written once."""
    shape = [1 if s == 0 and n > 1 else n for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(shape, tensor.stride(), tensor.storage_offset())


def strides_for(value: Tensor, layout: str | None) -> tuple[tuple[int, ...], int]:
    """(strides, shift in elements) of `value` in the named layout."""
    shape = list(value.shape)
    if layout is None or value.numel() == 0:
        return tuple(value.stride()), 0
    if layout == "contiguous":
        return _dense(shape, range(len(shape))), 0
    if layout == "sliced":  # as wide[::2, 1 : 1 + n]: dense rows at unaligned addresses, with gaps between them
        return _sliced(shape), 1
    if layout == "stepped":
        return tuple(2 * s for s in _dense(shape, range(len(shape)))), 0
    if layout == "transposed":
        order = list(range(len(shape)))
        return _dense(shape, order[:-2] + order[:-3:-1] if len(order) > 1 else order), 0
    raise ValueError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")


def _sliced(shape: list[int]) -> tuple[int, ...]:
    if len(shape) < 2:
        return (1,) * len(shape)
    outer = _dense(shape[:-1], range(len(shape) - 1))
    return (*(2 * s * (shape[-1] + 1) for s in outer), 1)


def _dense(shape: list[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor whose axes lie in memory in `order`, innermost last."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(list(order)):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def aliases(results: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> set[tuple[str, str]]:
    """Pairs of names: a result, and another result or one of `others` that shares at least one byte with it."""
    pairs = set()
    items = list(results.items())
    for i, (name, tensor) in enumerate(items):
        for other, second in [*items[i + 1 :], *others.items()]:
            if tensor is not second and overlap(tensor, second):
                pairs.add((name, other))
            elif tensor is second and tensor.numel():
                pairs.add((name, other))
    return pairs


def overlapping(tensors: Mapping[str, Tensor]) -> set[tuple[str, str]]:
    """(name, name) of every tensor in which elements share memory with others, as after `expand`."""
    strides = {n: zip(t.shape, t.stride(), strict=True) for n, t in tensors.items() if t.numel()}
    return {(n, n) for n, axes in strides.items() if any(size > 1 and stride == 0 for size, stride in axes)}


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share at least one byte."""
    if a.numel() == 0 or b.numel() == 0 or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    spans = [_span(t) for t in (a, b)]
    if spans[0][1] <= spans[1][0] or spans[1][1] <= spans[0][0]:
        return False
    if a.is_contiguous() and b.is_contiguous() or a.element_size() != b.element_size():
        return True
    low = min(a.storage_offset(), b.storage_offset())
    size = max(s[1] for s in spans) // a.element_size() + 1
    touched = torch.zeros(size, dtype=torch.bool)
    touched.as_strided(a.shape, a.stride(), a.storage_offset() - low).fill_(True)
    return bool(touched.as_strided(b.shape, b.stride(), b.storage_offset() - low).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    first = int(tensor.storage_offset())
    last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default,
    _aten.empty_strided.default, _aten.new_empty_strided.default, _aten.empty_permuted.default,
}  # fmt: skip
_FILLED = {
    _aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default, _aten.full.default, _aten.full_like.default,
    _aten.new_full.default, _aten.ones.default, _aten.ones_like.default, _aten.new_ones.default,
}  # fmt: skip
_RESIZE = {
    _aten.resize_.default, _aten.resize_as_.default, _aten.set_.source_Storage_storage_offset, _aten.set_.source_Tensor,
}  # fmt: skip
_BUILTIN = {"aten", "prims", "prim", "inductor", "c10d", "_c10d_functional", "profiler"}
_kinds: dict[
    int, tuple[object, str]
] = {}  # by id: the hash of an operator runs Python code and costs more than the rest


def _kind(func: OpOverload) -> str:
    """Kind of an operator for Poison: empty, filled, resize, custom, or plain (which may write to out= only)."""
    entry = _kinds.get(id(func))
    if entry is None:
        sets = {"empty": _EMPTY, "filled": _FILLED, "resize": _RESIZE}
        default = "plain" if func.namespace in _BUILTIN else "custom"
        entry = _kinds[id(func)] = func, next((name for name, operators in sets.items() if func in operators), default)
    return entry[1]


class Poison(DispatchMode):
    """Dispatch mode that puts guard bands around every `empty*`, `zeros*`, `ones*` and `full*`, and poisons `empty*`.

    It works in the forward and in autograd's threads, which inherit it. Python custom operators run with the mode on,
    so their buffers have guard bands too. It does not see what C++ code or programs of `torch.compile` allocate.
    """

    def __init__(self, arena: Arena):
        super().__init__()
        self.arena = arena
        self.count = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kind = _kind(func)
        if not kwargs:
            if kind == "plain":
                return func(*args)
            kwargs = {}
        if kind == "empty":
            return self._with_bands(func(*args, **kwargs))
        if kind == "filled":
            plain = func(*args, **kwargs)
            banded = self._with_bands(plain)
            return plain if banded is plain else banded.copy_(plain)
        if kind == "custom":
            return self._enter(func, args, kwargs)
        written = args[:1] if kind == "resize" else kwargs.values()  # out= may resize as well
        plain = [t for t in written if type(t) is Tensor and t.layout == torch.strided]
        owned = [(t, owner, t.shape) for t in plain if (owner := self.arena.owner(t)) is not None]
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if "not resizable" not in str(error) or not owned:
                raise
            _move_to_torch_memory([tensor for tensor, _, _ in owned])
            result = func(*args, **kwargs)
        for tensor, owner, shape in owned:
            if kind == "resize" or tensor.shape != shape:
                self.arena.forget(owner)
        return result

    def _with_bands(self, fresh: Tensor) -> Tensor:
        ordinary = type(fresh) is Tensor and fresh.layout == torch.strided and fresh.device.type != "meta"
        if not ordinary or fresh.numel() == 0 or fresh.is_quantized or fresh.is_pinned() or clears_caches(fresh):
            return fresh
        self.count += 1
        label = f"{SCRATCH} {self.count} {list(fresh.shape)}"
        # torch relies on storage_offset 0: for an in-place write to a view, autograd recreates the view in a
        # new_empty_strided, at the view's offset in the base
        return self.arena.allocate(
            fresh.shape, fresh.stride(), fresh.dtype, fresh.device, label, at_storage_start=True
        ).tensor

    def _enter(self, func: OpOverload, args: tuple, kwargs: dict) -> object:
        """Calls the kernel of a custom operator with the mode on; otherwise the mode would not see its allocations."""
        key = _backend_key(args, kwargs)
        if key is None or not any(map(func.has_kernel_for_dispatch_key, (key, _COMPOSITE))):
            return func(*args, **kwargs)
        with self:
            return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def _move_to_torch_memory(tensors: Sequence[Tensor]) -> None:
    """Moves tensors to memory that torch allocates, because it can grow."""
    for tensor in tensors:
        own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        tensor.set_(own.copy_(tensor).untyped_storage(), 0, tensor.shape, tensor.stride())


_COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd


def _backend_key(args: tuple, kwargs: dict) -> torch._C.DispatchKey | None:
    """The dispatch key of the first tensor's device."""
    from torch.utils._pytree import tree_leaves

    for leaf in tree_leaves((args, kwargs)):
        if type(leaf) is Tensor:
            return {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}.get(leaf.device.type)
    return None
