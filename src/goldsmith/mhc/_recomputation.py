"""Recomputes the cheap operators before an expensive layer: their saved tensors are dropped after the forward.

    region = Region(build, kept)
    outputs = region.run()              runs build(); of the tensors that its operators save, only `kept` stay
    with region.watching():             an operator that saves one of the outputs keeps a reference to it by index
        ...

The first reference that the backward opens runs build() once more, under the autocast of the first run. All references
are served from that run, which is freed with the last of them. This is correct only if build() repeats bit for bit.
Operators of this library do, but the norm that build() calls may not:

- A norm that draws random numbers, or writes to its buffers, parameters or attributes (dropout, BatchNorm in training),
  is not run again: that region keeps everything that it saved, as without recomputation.
- Other hidden state is caught by comparing a sample of the norm's result with the first run's. A GPU would have to wait
  for the result, so only a CPU does this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from ..core.sharding import parts
from ._side_effects import State, repeats, same, sample


@dataclass(frozen=True)
class _Kept:
    """A kept tensor and its version when saved: saved-tensor hooks switch off autograd's own check for writes."""

    tensor: Tensor
    version: int

    def open(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "a tensor that a recomputed connection needs in its backward was modified by an inplace operation: "
                f"{list(self.tensor.shape)} is at version {self.tensor._version}, was at {self.version}"
            )
        return self.tensor


@dataclass(frozen=True)
class _SavedTensor:
    """Reference to the index-th tensor that build() saved."""

    region: Region
    index: int

    def open(self) -> Tensor:
        return self.region.again()[0][self.index].open()


@dataclass(frozen=True)
class _OutputView:
    """Reference to a view of the index-th output of build(); offset counts from that output's first element.

    Of a DTensor, all of this describes the rank's own part, and `whole` makes a DTensor of it.
    """

    region: Region
    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: Callable[[Tensor], Tensor]

    def open(self) -> Tensor:
        output, _ = parts(self.region.again()[1][self.index].open())
        return self.whole(output.as_strided(self.size, self.stride, output.storage_offset() + self.offset))


@dataclass(frozen=True)
class _OutputLayout:
    """Identifies an output of build(): its storage, layout, offset and version."""

    storage: int
    layout: tuple
    offset: int
    version: int


class Region:
    """A recomputed stretch of the forward: build() returns tensors, the second being norm's result if there is a norm.

    See the module's docstring for its use.
    """

    def __init__(
        self, build: Callable[[], tuple[Tensor, ...]], kept: Sequence[Tensor], norm: Callable[[Tensor], Tensor] | None
    ) -> None:
        fake = isinstance(kept[0], FakeTensor)  # without data, nothing is drawn and nothing can be compared
        self._build, self._doubtful = build, None if fake or repeats(norm) else norm
        self._kept = [_Kept(t, t._version) for t in kept]
        device = kept[0].device.type
        self._autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self._count = 0
        self._outputs: list[_OutputLayout] = []
        self._sample: Tensor | None = None
        self._live: Sequence[Tensor] = ()
        self._again: tuple[list[_Kept], list[_Kept]] | None = None

    def run(self) -> tuple[Tensor, ...]:
        if self._doubtful is None:
            with saved_tensors_hooks(self._note, _open):
                outputs = self._build()
        else:
            outputs = self._run_watched()
        self._outputs = [_output(t) for t in outputs]
        self._live = outputs
        return outputs

    def _run_watched(self) -> tuple[Tensor, ...]:
        saved: list[_Kept] = []

        def note(t: Tensor) -> _Kept | _SavedTensor:
            record = self._note(t)
            if isinstance(record, _SavedTensor):
                saved.append(_Kept(t.detach(), t._version))
            return record

        device = self._kept[0].tensor.device
        state = State(self._doubtful, device)
        with saved_tensors_hooks(note, _open), state.watching():
            outputs = self._build()
        if state.has_changed():
            self._again = saved, [_Kept(t.detach(), t._version) for t in outputs]
        elif device.type == "cpu":
            self._sample = sample(outputs[1])
        return outputs

    @contextmanager
    def watching(self) -> Iterator[None]:
        with saved_tensors_hooks(self._note_output, _open):
            yield
        self._live = ()  # kept alive so far, because a new tensor may reuse a freed storage's address

    def again(self) -> tuple[list[_Kept], list[_Kept]]:
        """Everything that build() saved, and its outputs."""
        if self._again is None:
            saved: list[Tensor] = []
            for kept in self._kept:
                kept.open()
            device, dtype, enabled = self._autocast
            with torch.enable_grad(), torch.autocast(device, dtype, enabled), saved_tensors_hooks(
                lambda t: None if self._is_kept(t) else saved.append(t.detach()), _open
            ):  # fmt: skip
                outputs = [t.detach() for t in self._build()]
            alike = len(saved) == self._count and [_layout(t) for t in outputs] == [o.layout for o in self._outputs]
            if not alike or not (self._sample is None or same(sample(outputs[1]), self._sample)):
                raise RuntimeError(
                    "recomputing a connection gave different tensors than the first run: a norm must compute the "
                    "same on every call; if yours cannot, use recompute=False"
                )
            self._again = [_Kept(t, t._version) for t in saved], [_Kept(t, t._version) for t in outputs]
        return self._again

    def _is_kept(self, t: Tensor) -> bool:
        return (t.is_leaf and t.requires_grad) or any(t is kept.tensor for kept in self._kept)

    def _note(self, t: Tensor) -> _Kept | _SavedTensor:
        if self._is_kept(t):
            return _Kept(t.detach(), t._version)
        self._count += 1
        return _SavedTensor(self, self._count - 1)

    def _note_output(self, t: Tensor) -> _Kept | _OutputView:
        own, whole = parts(t)
        for index, output in enumerate(self._outputs):
            if (
                _storage(own) == output.storage
                and t._version == output.version
                and t.dtype == output.layout[-1]
                and own.numel()
            ):
                offset = int(own.storage_offset()) - output.offset
                return _OutputView(self, index, tuple(own.shape), own.stride(), offset, whole)
        return _Kept(t.detach(), t._version)


def _open(note: _Kept | _SavedTensor | _OutputView) -> Tensor:
    return note.open()


def _output(t: Tensor) -> _OutputLayout:
    own, _ = parts(t)
    return _OutputLayout(_storage(own), _layout(t), int(own.storage_offset()), t._version)


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _layout(t: Tensor) -> tuple:
    return tuple(t.shape), t.stride(), t.dtype
