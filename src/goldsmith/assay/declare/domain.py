"""Domain: which sizes, scalars and inputs a kernel must take. `where` of a case says so, and is bound by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...core.tracing import TargetError
from .binding import bind, parameters

Where = Callable[..., object]


class OutsideDomain(ValueError):
    """The run was left out, because its inputs are none that the kernel must take."""


def of_sizes_alone(where: Where, sizes: Mapping[str, object]) -> bool:
    """Whether `where` can be asked before inputs are drawn."""
    return set(parameters(where)) <= set(sizes)


def admits(where: Where, names: Mapping[str, object]) -> bool:
    """Whether `where` is True for these sizes, scalars and inputs."""
    bound = bind("where", where, names)
    try:
        return bool(bound(names))
    except Exception as error:
        what = f"{type(error).__name__}: {error}"[:200]
        raise TargetError(
            f"where: raised {what}; it must return True or False, and bool(t.all()) for a tensor"
        ) from error
