"""Reusable host buffers for copies to and from a device; an event says when each is free again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from .streams import DONE, CudaStream, StreamEvent

_View: TypeAlias = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a view of a buffer


class PinnedBuffers:
    """`count` buffers in rotation; `take` waits for the event with which a buffer was released before reusing it.

    Buffers hold bytes, so each use chooses its own dtype.
    """

    def __init__(self, allocate: Callable[[int], Tensor], count: int = 2) -> None:
        self._allocate = allocate
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * count
        self._free: list[StreamEvent] = [DONE] * count
        self._at = 0
        self._views: list[dict[_View, Tensor]] = [{} for _ in range(count)]

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next buffer as a tensor with arbitrary contents."""
        self._at = (self._at + 1) % len(self._buffers)
        self._free[self._at].synchronize()
        views = self._views[self._at]
        known = views.get((shape, dtype))
        return self._new_view(shape, dtype, views) if known is None else known

    def _new_view(self, shape: tuple[int, ...], dtype: torch.dtype, views: dict[_View, Tensor]) -> Tensor:
        numel = 1
        for size in shape:
            numel *= size
        nbytes = numel * dtype.itemsize
        if self._buffers[self._at].numel() < nbytes:
            views.clear()
            with torch.inference_mode(False):
                # a power of two, as torch allocates pinned memory anyway: a slightly longer prompt fits too
                self._buffers[self._at] = self._allocate(max(4096, 1 << (nbytes - 1).bit_length()))
        if len(views) > 1024:
            views.clear()
        views[shape, dtype] = view = self._buffers[self._at][:nbytes].view(dtype).view(shape)
        return view

    def release(self, event: StreamEvent) -> None:
        """Frees the buffer taken last, once `event` has happened."""
        self._free[self._at] = event


class Packets:
    """Short lists of integers sent to the device, several in one copy; `count` packets in rotation.

    Uses few torch operations, because each takes as long as the lists themselves. A packet is reused when the event
    given back for it has happened.
    """

    def __init__(
        self, allocate: Callable[[int], Tensor], device: torch.device, count: int = 8, size: int = 1024
    ) -> None:
        with torch.inference_mode(False):
            self._hosts = [allocate(4 * size).view(torch.int32) for _ in range(count)]
            self._devices = [torch.empty(size, dtype=torch.int32, device=device) for _ in range(count)]
        self._numbers = [host.numpy() for host in self._hosts]
        self._free: list[StreamEvent] = [DONE] * count
        self._views: dict[tuple[int, ...], tuple[Tensor, Tensor, tuple[Tensor, ...]]] = {}
        self._at, self.size = 0, size

    def send(self, lists: Sequence[list[int]], move: Callable[[Tensor, Tensor, CudaStream], None], stream: CudaStream
             ) -> tuple[Tensor, ...]:  # fmt: skip
        """Copies the lists to the device, one after the other in one buffer of at most `size` numbers; returns views

        move(host, device, stream) makes the copy.
        """
        self._at = at = (self._at + 1) % len(self._hosts)
        self._free[at].synchronize()
        self._free[at] = DONE
        key = (at, *map(len, lists))
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = self._cut(at, key[1:])
        host, device, parts = views
        self._numbers[at][: len(host)] = [number for numbers in lists for number in numbers]
        move(host, device, stream)
        return parts

    def release(self, event: StreamEvent) -> None:
        """Frees the packet sent last, once `event` has happened."""
        self._free[self._at] = event

    def _cut(self, at: int, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        if len(self._views) > 4096:
            self._views.clear()
        host, device = self._hosts[at][: sum(sizes)], self._devices[at][: sum(sizes)]
        return host, device, device.split(sizes)
