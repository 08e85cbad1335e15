"""What this machine has, and why a backend cannot run here, as a sentence."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


class BackendUnavailable(RuntimeError):
    """A backend that was requested by name cannot run here; the text says why."""


class UnsupportedCall(BackendUnavailable, ValueError):
    """A backend that could run here, but not with these arguments; it is a ValueError as well."""


@dataclass(frozen=True)
class Machine:
    """The facts that decide which backends run. `goldsmith doctor` prints them, and benchmark rows carry them."""

    cpu: str
    isa: tuple[str, ...]
    cores: int
    memory_gib: float
    python: str
    torch: str
    triton: str | None
    interpreter: bool
    gpus: tuple[dict[str, Any], ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def short(self) -> str:
        """One word for tables: the first GPU, or the processor."""
        return self.gpus[0]["name"] if self.gpus else self.cpu


_ISA_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")


@functools.cache
def machine() -> Machine:
    name, flags = _cpu()
    gpus = tuple(_gpu(i) for i in range(torch.cuda.device_count())) if torch.cuda.is_available() else ()
    return Machine(
        cpu=name,
        isa=tuple(f for f in _ISA_FLAGS if f in flags),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=round(_memory_bytes() / 2**30, 1),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=triton_version(),
        interpreter=triton_interpreted(),
        gpus=gpus,
    )


def triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def triton_interpreted() -> bool:
    """True if Triton runs kernels in its interpreter. Read once, because Triton reads it when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@functools.cache
def _triton_importable() -> bool:
    return importlib.util.find_spec("triton") is not None


def triton_unavailable(tensors: Mapping[str, torch.Tensor | None]) -> str | None:
    """Why Triton kernels cannot take these tensors, or None."""
    first = next((t for t in tensors.values() if t is not None), None)
    if not _triton_importable():
        return "Triton is not installed (it needs Linux: pip install triton)"
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype == torch.float64:
            return f"{name} is float64, which only the reference supports"
    if triton_interpreted() and (first is None or first.device.type in ("cpu", "cuda")):
        return interpreter_unavailable()
    if first is not None and first.is_cuda:
        return None
    where = "there are no tensors" if first is None else f"the inputs are on {first.device.type}"
    return f"needs a CUDA device; {where} (TRITON_INTERPRET=1, set before the import, runs it on the CPU, slowly)"


def grouped_unavailable(tensors: Mapping[str, torch.Tensor | None]) -> str | None:
    """Why torch's grouped products cannot take these tensors, or None."""
    first = next((t for t in tensors.values() if t is not None), None)
    if first is None or not first.is_cuda:
        where = "there are no tensors" if first is None else f"the inputs are on {first.device.type}"
        return f"needs a CUDA device; {where}"
    return None if hasattr(torch, "_grouped_mm") else f"torch {torch.__version__} has no _grouped_mm; 2.11 has it"


@functools.cache
def interpreter_unavailable() -> str | None:
    """Why Triton's interpreter cannot run here, or None: 3.6 converts arrays of one element to numbers, which numpy
    refuses since 2.4.
    """
    triton, numpy = triton_version(), importlib.metadata.version("numpy")
    if triton and _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        return (
            f"the interpreter of Triton {triton} needs numpy < 2.4; numpy {numpy} is installed "
            "(pip install 'numpy<2.4', or Triton 3.7 or newer)"
        )
    return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _cpu() -> tuple[str, set[str]]:
    name, flags = platform.processor() or platform.machine(), set[str]()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            for line in f:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    name = value.strip()
                elif key.strip() == "flags":
                    flags = set(value.split())
                    break
    except OSError:
        pass  # not Linux: the name above has to do
    return name, flags


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def _gpu(index: int) -> dict[str, object]:
    p = torch.cuda.get_device_properties(index)
    return {
        "name": p.name,
        "memory_gib": round(p.total_memory / 2**30, 1),
        "capability": f"{p.major}.{p.minor}",
        "multiprocessors": p.multi_processor_count,
        "l2_mib": round(getattr(p, "L2_cache_size", 0) / 2**20, 1),
    }
