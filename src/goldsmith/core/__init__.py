"""The base layer: declarations of operators, and what this machine can run. Imports only torch, on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .device import BackendUnavailable, Machine, machine
    from .op import Backend, Op
    from .shapes import ShapeError, check_shapes

_MODULES = {
    "Backend": "op",
    "BackendUnavailable": "device",
    "Machine": "device",
    "Op": "op",
    "ShapeError": "shapes",
    "check_shapes": "shapes",
    "machine": "device",
}

__all__ = ["Backend", "BackendUnavailable", "Machine", "Op", "ShapeError", "check_shapes", "machine"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
