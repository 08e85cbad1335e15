"""Copies of a store's bytes to the device, in one of three modes.

registered  the store's mapping is page-locked as read-only (cudaHostRegister with flag 8). Copies run at link speed,
            and memory holds the bytes once. Drivers refuse a read-only mapping without that flag. A refusal leaves a
            CUDA error, which the next CUDA call of any library would raise; `register` clears it
ring        threads copy the bytes into a few page-locked buffers; used if registration is refused
memory      plain copies; used if the device is the CPU, or if no memory can be page-locked
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..store.expert_store import ExpertStore
from .streams import StreamEvent

_READ_ONLY = 8  # cudaHostRegisterReadOnly
_HOST_TO_DEVICE = 1  # cudaMemcpyHostToDevice
_READ_ONLY_SUPPORTED = 113  # cudaDevAttrHostRegisterReadOnlySupported
_BUFFERS, _PIECE = 8, 2 << 20  # buffers of a ring, bytes of each; threads fill half of them while the rest is copied
_FILLERS = 4  # threads: a single one reached 5.5 GB/s, a pageable copy 7.9 GB/s (H100, 16 cores)
_SHARE = 0.8  # of free memory: locking more would evict what other programs need
_OP = "offload.Transport"
MODES = ("registered", "ring", "memory")


class Transport:
    """Copies of a store's bytes to a device.

    mode    "registered", "ring" or "memory"; force= requires one; ValueError if it is impossible
    why     the reason for the mode, as text
    """

    def __init__(self, store: ExpertStore, device: torch.device | str, *, force: str | None = None) -> None:
        if force not in (None, *MODES):
            raise ValueError(f"{_OP}: force={force!r}, expected one of {', '.join(MODES)}, or None")
        self.device = torch.device(device)
        self._stride = store.blocks.stride
        self._registration: Registration | None = None
        self._cuda: Any = None
        self._ring: TransportRing | None = None
        if self.device.type != "cuda":
            if force not in (None, "memory"):
                raise ValueError(f"{_OP}: force={force!r} needs a CUDA device, not {self.device}")
            self.mode, self.why = "memory", f"the device is {self.device}: bytes are copied from memory to memory"
            return
        self.mode, self.why = self._choose(store, force)

    def _choose(self, store: ExpertStore, force: str | None) -> tuple[str, str]:
        refusals: list[str] = []
        for mode, begin in (("registered", self._register), ("ring", self._fill_ring)):
            if force in (None, mode):
                reason = begin(store)
                if reason is None:
                    return mode, "; ".join([*refusals, _MODE_DESCRIPTIONS[mode]])
                refusals.append(f"not {mode}: {reason}")
        if force in ("registered", "ring"):
            raise ValueError(f"{_OP}: force={force!r} is impossible here: {refusals[0]}")
        return "memory", "; ".join([*refusals, _MODE_DESCRIPTIONS["memory"]])

    def _register(self, store: ExpertStore) -> str | None:
        """Page-locks the mapping; returns None, or the reason why that failed."""
        free = free_memory()
        if free is not None and store.nbytes > _SHARE * free:
            return f"the store has {store.nbytes / 1e9:.1f} GB, but {free / 1e9:.1f} GB of memory is available"
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().synchronize()  # creates the device's context
            cuda = runtime()
            registration = register(store.whole(), self.device.index or torch.cuda.current_device(), cuda)
        if isinstance(registration, str):
            return registration
        self._registration, self._cuda = registration, cuda
        return None

    def _fill_ring(self, store: ExpertStore) -> str | None:
        try:
            size = min(_PIECE, self._stride)
            buffers = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(_BUFFERS)]
        except RuntimeError as error:
            return f"no page-locked buffers ({str(error).splitlines()[0]})"
        self._ring = TransportRing(buffers, _event_of)
        return None

    def copy(self, source: Tensor, out: Tensor, stream: torch.cuda.Stream | None = None) -> None:
        """Copies the bytes `source` of the store to `out` on the device

        Ordered on `stream` (a torch.cuda.Stream; None: the current one) without waiting, except in mode "memory".
        Raises ValueError unless both are contiguous and of the same size.
        """
        if source.numel() != out.numel() or not (source.is_contiguous() and out.is_contiguous()):
            raise ValueError(
                f"{_OP}: source is {list(source.shape)} and out {list(out.shape)}; expected contiguous tensors "
                "of the same size"
            )
        if self._cuda is not None:
            self._copy_registered(source, out, stream or torch.cuda.current_stream(self.device))
            return
        source, out = source.view(-1), out.view(-1)
        if self.device.type != "cuda":
            move(source, out)
            return
        with torch.cuda.stream(stream):
            if self._ring is not None:
                self._ring.copy(source, out)
            else:
                out.copy_(source)

    def _copy_registered(self, source: Tensor, out: Tensor, stream: torch.cuda.Stream) -> None:
        """Copy with cudaMemcpyAsync, because torch's copy takes 10 us more of the caller's time."""
        status = self._cuda.cudaMemcpyAsync(
            ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(source.data_ptr()), ctypes.c_size_t(source.numel()),
            ctypes.c_int(_HOST_TO_DEVICE), ctypes.c_void_p(stream.cuda_stream),
        )  # fmt: skip
        if status:
            self._cuda.cudaGetLastError()
            text = self._cuda.cudaGetErrorString(ctypes.c_int(status)).decode(errors="replace")
            raise RuntimeError(f"{_OP}: a copy of {source.numel()} bytes to {self.device} failed: {text}")

    def close(self) -> None:
        """Releases page-locked memory. Call it after all copies have arrived; a second call does nothing."""
        if self._ring is not None:
            self._ring.close()
        self._registration = self._ring = self._cuda = None


_MODE_DESCRIPTIONS = {
    "registered": "the store's pages are page-locked where they are mapped",
    "ring": f"the engine copies through {_BUFFERS} page-locked buffers",
    "memory": "the engine copies from pageable memory, which is slow and blocks the caller",
}


class TransportRing:
    """Page-locked buffers used in turn: a buffer is refilled only after its copy has arrived

    Threads fill them, one buffer each; the calling thread launches the copies in order.
    """

    def __init__(self, buffers: Sequence[Tensor], mark: Callable[[], StreamEvent]) -> None:
        self._buffers, self._mark = buffers, mark
        self._events: list[Any] = [None] * len(buffers)
        self._next = 0
        self._lock = threading.Lock()
        self._ahead = min(_FILLERS, len(buffers))
        self._fillers = ThreadPoolExecutor(self._ahead, "goldsmith ring")  # starts its threads on demand

    def copy(self, source: Tensor, out: Tensor) -> None:
        with self._lock:
            size = self._buffers[0].numel()
            filling: deque[tuple[int, Tensor, Tensor, Future[None]]] = deque()
            for begin in range(0, source.numel(), size):
                if len(filling) == self._ahead:
                    self._launch(*filling.popleft())
                part = source[begin : begin + size]
                i, self._next = self._next, (self._next + 1) % len(self._buffers)
                if self._events[i] is not None:
                    self._events[i].synchronize()
                buffer = self._buffers[i][: part.numel()]
                filled = self._fillers.submit(move, part, buffer)
                filling.append((i, buffer, out[begin : begin + size], filled))
            while filling:
                self._launch(*filling.popleft())

    def _launch(self, i: int, buffer: Tensor, out: Tensor, filled: Future[None]) -> None:
        filled.result()
        out.copy_(buffer, non_blocking=True)
        self._events[i] = self._mark()

    def wait(self) -> None:
        for event in self._events:
            if event is not None:
                event.synchronize()

    def close(self) -> None:
        self.wait()
        self._fillers.shutdown()


def _event_of() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def move(source: Tensor, out: Tensor) -> None:
    """Copies `source` to `out` with memmove, in the calling thread, without the GIL

    torch's copy wakes its whole thread pool: 73 kB took 30 ms while another process used one of two cores.
    """
    if source.numel():
        ctypes.memmove(out.data_ptr(), source.data_ptr(), source.numel())


# -- registration -----------------------------------------------------------------------------------------------------


class Registration:
    """Page-locked bytes; they stay locked and mapped as long as this object lives."""

    def __init__(self, pages: Tensor, cuda: ctypes.CDLL) -> None:
        self.pages = pages
        self._finalizer = weakref.finalize(self, _unregister, pages, cuda)
        self._finalizer.atexit = False  # at exit the driver shuts down by itself


_REGISTERED: weakref.WeakValueDictionary[int, Registration] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def register(pages: Tensor, device: int, cuda: ctypes.CDLL | None) -> Registration | str:
    """Page-locks these bytes for reading. Returns the registration, or why it failed; clears any CUDA error."""
    if cuda is None:
        return "the CUDA runtime that torch uses was not found"
    with _LOCK:
        known = _REGISTERED.get(pages.data_ptr())
        if known is not None and known.pages.numel() == pages.numel():
            return known
        supported = ctypes.c_int(0)
        status = cuda.cudaDeviceGetAttribute(
            ctypes.byref(supported), ctypes.c_int(_READ_ONLY_SUPPORTED), ctypes.c_int(device)
        )
        if status or not supported.value:
            cuda.cudaGetLastError()
            return "the device cannot lock memory that is mapped read-only"
        status = cuda.cudaHostRegister(
            ctypes.c_void_p(pages.data_ptr()), ctypes.c_size_t(pages.numel()), ctypes.c_uint(_READ_ONLY)
        )
        if status:
            cuda.cudaGetLastError()  # clears the error, which the next CUDA call of any library would raise
            text = cuda.cudaGetErrorString(ctypes.c_int(status)).decode(errors="replace")
            return f"cudaHostRegister of {pages.numel() / 1e9:.1f} GB failed: {text} (error {status})"
        registration = Registration(pages, cuda)
        _REGISTERED[pages.data_ptr()] = registration
        return registration


def _unregister(pages: Tensor, cuda: ctypes.CDLL) -> None:
    if cuda.cudaHostUnregister(ctypes.c_void_p(pages.data_ptr())):
        cuda.cudaGetLastError()


def runtime() -> ctypes.CDLL | None:
    """The CUDA runtime library that this process has loaded; None if there is none, or it is linked statically."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        path = "/" + line.partition("/")[2]
        if Path(path).name.startswith("libcudart"):
            library = ctypes.CDLL(path)
            library.cudaGetErrorString.restype = ctypes.c_char_p
            return library
    return None


def free_memory(root: Path = Path("/")) -> int | None:
    """Available bytes of the system or of the cgroup (v2, at its root), whichever is less; None if unknown."""
    limits = []
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    limit = _text(root / "sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        used = _text(root / "sys/fs/cgroup/memory.current").strip()
        kept = [row.split()[1] for row in _text(root / "sys/fs/cgroup/memory.stat").splitlines() if row[:5] == "file "]
        limits.append(int(limit) - (int(used) if used.isdigit() else 0) + sum(map(int, kept)))
    return min(limits, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
