"""Operators for mixture-of-experts and hyper-connected transformers, each with a float64 golden reference.

Names load at first use: `import goldsmith` alone imports neither torch nor triton.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import assay, experts, mhc, router
    from .core import BackendUnavailable, Op, ShapeError

_HOME = {
    "assay": ".assay",
    "experts": ".experts",
    "mhc": ".mhc",
    "router": ".router",
    "BackendUnavailable": ".core",
    "Op": ".core",
    "ShapeError": ".core",
}

__all__ = ["BackendUnavailable", "Op", "ShapeError", "__version__", "assay", "experts", "mhc", "router"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'goldsmith' has no attribute {name!r}; public names: {', '.join(__all__)}")
    module = importlib.import_module(home, __name__)
    value = module if home == f".{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
