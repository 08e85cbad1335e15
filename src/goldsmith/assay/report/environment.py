"""The environment of a report: versions and machine."""

from __future__ import annotations

import functools
import importlib.metadata
import platform

import torch


def environment(device: str | torch.device) -> dict[str, object]:
    """Versions and machine, as far as they can affect a number. interpreted: launches in Triton's interpreter."""
    gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "triton": _triton_version(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "threads": torch.get_num_threads(),
        "interpreted": 0,
        "runs": {"candidate": 0, "golden": 0, "calls": 0},
    }


@functools.cache
def _triton_version() -> str | None:
    """The installed version: a candidate may import Triton only when it runs."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
