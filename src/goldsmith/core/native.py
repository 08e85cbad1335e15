"""The native library: loaded on first use, with its C ABI declared in ctypes (csrc/goldsmith.h is the original).

A ctypes call releases the GIL. The library never throws: `check(status)` raises its error message.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shlex
import struct
import sys
import warnings
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

import torch

from . import processors
from .device import BackendUnavailable

LEVELS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
PROBES = ("read", "fma", "vnni", "dot_bf16", "amx_int8", "amx_bf16", "amx_l1", "amx_l2", "amx_stream")
DTYPES = {
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.uint8: 4,
    torch.int8: 5,
    torch.int32: 6,
    torch.int64: 7,
}
_NOT_BUILT = "the native library was not built"
_warned = False  # whether this process has warned that the library was not built
# the TensorView structure of each rank
_VIEWS = [struct.Struct(f"Pii{rank}q{8 * (4 - rank)}x{rank}q{8 * (4 - rank)}x") for rank in range(5)]
_RAISES = {1: ValueError, 2: BackendUnavailable, 3: MemoryError, 4: RuntimeError}


class Structure(ctypes.Structure):
    """A structure of the ABI. `_c_name_` is its name in goldsmith.h; fields are zero unless given, and its size is
    filled in.
    """

    _c_name_: str

    def __init__(self, **fields: object) -> None:
        super().__init__(**fields)
        if hasattr(type(self), "size"):
            self.size = ctypes.sizeof(self)


class TensorView(Structure):
    """The address, sizes and strides of a tensor. The caller must keep the tensor alive until the call returns."""

    _c_name_ = "gs_tensor"
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("sizes", c_int64 * 4),
        ("strides", c_int64 * 4),
    ]


class MeasureArgs(Structure):
    _c_name_ = "gs_measure_args"
    _fields_ = [
        ("size", c_size_t),
        ("threads", c_int32),
        ("what", c_int32),
        ("seconds", c_double),
        ("bytes", c_int64),
        ("rows", c_int64),
        ("per_second", c_double),
    ]


class _Field(ctypes.Structure):
    _fields_ = [("structure", c_char_p), ("field", c_char_p), ("offset", c_size_t), ("size", c_size_t)]


def put(tensor: torch.Tensor, into: ctypes.Structure, offset: int) -> None:
    """Write the TensorView of a CPU tensor into a structure in one step; field by field takes 6 us."""
    # otherwise the library would read and write at a foreign address
    if not tensor.is_cpu or tensor.dtype not in DTYPES:
        raise RuntimeError(f"native: the kernels do not support a {tensor.dtype} tensor on {tensor.device}")
    shape = tensor.shape
    rank = len(shape)
    _VIEWS[rank].pack_into(into, offset, tensor.data_ptr(), DTYPES[tensor.dtype], rank, *shape, *tensor.stride())


def threads() -> int:
    """The number of threads of a call: torch's current setting, but no more than can run at the same time."""
    return min(torch.get_num_threads(), processors.worth())


def library() -> ctypes.CDLL:
    """The library at the requested level. Raises BackendUnavailable with the reason if there is none."""
    result = _load()
    if isinstance(result, str):
        raise BackendUnavailable(f"native: {result}")
    return result


def reason() -> str | None:
    """Why the native backends cannot run here, as a sentence; None if they can."""
    result = _load()
    return result if isinstance(result, str) else None


def warn_if_not_built(why_not: str | None) -> None:
    """Warn once in a process if `why_not` says that the library was not built, which the user can mend."""
    global _warned
    if _warned or why_not is None or not why_not.startswith(_NOT_BUILT):
        return
    _warned = True
    text = f"goldsmith: {why_not}. The reference in plain torch runs instead, several times slower."
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def _how_to_build() -> str:
    root = Path(__file__).parents[3]
    script = root / "scripts" / "native.py"
    if script.exists() and (root / "CMakeLists.txt").exists():
        return f"to build it, run: {shlex.join([sys.executable, str(script)])}"
    return "the wheel that `make wheel` builds in a checkout of goldsmith includes it"


def unavailable(tensors: Mapping[str, torch.Tensor | None]) -> str | None:
    """Why native kernels cannot take these tensors, or None."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_cpu:
            return f"{name} is on {tensor.device}; the native kernels run on the CPU"
        if tensor.dtype == torch.float64:
            return f"{name} is float64, which only the reference supports"
    return reason()


def check(status: int) -> None:
    """Raise the library's error on this thread, if the status is not 0."""
    if status:
        raise _RAISES.get(status, RuntimeError)(library().gs_message().decode(errors="replace"))


def isa() -> str:
    """The instruction level in use: the machine's, or the lower one that GOLDSMITH_ISA names."""
    return LEVELS[library().gs_level()]


def machine_isa() -> tuple[str, str]:
    """The highest level that this machine can run, and why no higher one ("" at the top)."""
    loaded = library()
    return LEVELS[loaded.gs_machine_level()], loaded.gs_why_not_higher().decode()


def measure(what: str, *, threads: int = 0, seconds: float = 0.2, megabytes: int = 512, rows: int = 192) -> float:
    """The machine's measured peak at this level, per second, all threads together: bytes for "read", otherwise
    operations.

    "read", "amx_l1", "amx_l2" and "amx_stream" are averages over the time; the others use each thread's fastest
    interval. The amx probes run the loop of a layer's tile products, [rows, 2048] times stripes [2048, 32] in bfloat16:
    on the same 4 KiB of each again and again; on all rows and one stripe (which L2 holds if it is large enough); and on
    stripes from memory, each fetched while the one before it is multiplied.

    threads: 0 for torch's number. More than can run at the same time are started all the same.
    megabytes: read by all threads together, for "read" and "amx_stream".
    rows: of an expert, a multiple of 32; for "amx_l2" and "amx_stream". Every thread has its own.
    """
    args = MeasureArgs(
        threads=threads or torch.get_num_threads(),
        what=PROBES.index(what),
        seconds=seconds,
        bytes=megabytes << 20,
        rows=rows,
    )
    check(library().gs_measure(ctypes.byref(args)))
    return args.per_second


def layout() -> dict[str, dict[str, tuple[int, int]]]:
    """Offset and size of every field of the ABI, as the library has them; "" is the structure itself."""
    rows, row_number, fields = library().gs_layout(), 0, dict[str, dict[str, tuple[int, int]]]()
    while rows[row_number].structure is not None:
        row, row_number = rows[row_number], row_number + 1
        fields.setdefault(row.structure.decode(), {})[row.field.decode()] = (row.offset, row.size)
    return fields


def requested_level() -> str | None:
    """The level in GOLDSMITH_ISA, if it is set; ValueError if it names no level."""
    level = os.environ.get("GOLDSMITH_ISA", "").strip().lower()
    if level and level not in LEVELS:
        raise ValueError(f"GOLDSMITH_ISA={level!r} is not a level; choose one of: {', '.join(LEVELS)}")
    return level or None


@functools.cache
def _load() -> ctypes.CDLL | str:
    level = requested_level()
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"the native library needs Linux on x86-64; this is {platform.system()} on {platform.machine()}"
    path = Path(os.environ.get("GOLDSMITH_LIBRARY") or Path(__file__).parents[1] / "lib/libgoldsmith.so")
    if not path.exists():
        return f"{_NOT_BUILT} ({path} is missing); {_how_to_build()}"
    try:
        loaded = _declare(ctypes.CDLL(str(path)))
    except OSError as error:
        return f"the native library cannot be loaded: {error}"
    except AttributeError as error:
        return f"the native library belongs to another version: {error}"
    if level is not None:
        _lower(loaded, level)
    _place(loaded)
    return loaded


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    for name, result, *arguments in (
        ("gs_message", c_char_p),
        ("gs_layout", POINTER(_Field)),
        ("gs_level_name", c_char_p, c_int32),
        ("gs_machine_level", c_int32),
        ("gs_why_not_higher", c_char_p),
        ("gs_level", c_int32),
        ("gs_set_level", c_int32, c_int32),
        ("gs_workers_on", c_int32, POINTER(c_int32), POINTER(c_int32), c_int32),
        ("gs_say_at_bus_error", None, c_char_p),
        ("gs_measure", c_int32, POINTER(MeasureArgs)),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def _lower(loaded: ctypes.CDLL, level: str) -> None:
    highest = loaded.gs_machine_level()
    if LEVELS.index(level) > highest:
        why = loaded.gs_why_not_higher().decode()
        warnings.warn(
            f"GOLDSMITH_ISA={level} is above this machine's level, {LEVELS[highest]}, which is used instead: {why}",
            stacklevel=2,
        )
    else:
        loaded.gs_set_level(LEVELS.index(level))


def _place(loaded: ctypes.CDLL) -> None:
    """The processors for worker threads, spread over all NUMA nodes even if the first caller is bound to one."""
    places = [(processor, node) for processor, node in processors.places() if processor < 1024]
    listed = c_int32 * len(places)
    loaded.gs_workers_on(listed(*(p for p, _ in places)), listed(*(n for _, n in places)), len(places))
