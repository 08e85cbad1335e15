"""Whether a module may get our class: nobody has changed its forward, and its streams have a size for the kernels."""

from __future__ import annotations

import inspect

from torch import nn

from .families import Known

STREAMS = (1, 2, 3, 4, 8)  # n of the kernels; the references take any


def check_module(path: str, module: nn.Module, known: Known) -> None:
    """Raises ValueError with a sentence on what would be lost."""
    kind = type(module)
    if issubclass(kind, known.ours):
        raise _refusal(f"it is already applied to this model ({path} is computed by goldsmith.mhc)")
    if "forward" in vars(module):
        raise _refusal(
            f"{path} has a forward of its own ({_name(vars(module)['forward'])}), which would be lost. Apply first, "
            "and then what sets it (accelerate's hooks of device_map, kernelize, a patch)"
        )
    if getattr(module, "parametrizations", None):
        raise _refusal(f"{path} has parametrizations, which come with a class of their own. Apply first, then them")
    forward = inspect.unwrap(kind.forward)
    if forward is not inspect.unwrap(known.kind.forward):
        raise _refusal(f"{path} is a {kind.__module__}.{kind.__name__} with its own forward, which would be lost")
    if forward.__globals__["__name__"] != known.family.file or _foreign(kind.forward):
        raise _refusal(
            f"the forward of {known.kind.__name__} was replaced by {_name(forward)}, which would be lost. Leave out "
            "that patch"
        )
    n = getattr(module, "hc_mult", getattr(module, "hc_count", None))
    if n is not None and n not in STREAMS:
        raise _refusal(f"{path} has {n} streams, and the kernels take n in {', '.join(map(str, STREAMS))}")


def _foreign(forward: object) -> bool:
    """Whether one of the functions that wrap a class's forward is not of transformers."""
    while hasattr(forward, "__wrapped__"):
        if forward.__globals__["__name__"].partition(".")[0] != "transformers":  # type: ignore[attr-defined]
            return True
        forward = forward.__wrapped__
    return False


def _name(function: object) -> str:
    function = getattr(function, "func", getattr(function, "__func__", function))
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


def _refusal(why: str) -> ValueError:
    return ValueError(f"goldsmith.hf.apply: {why}")
