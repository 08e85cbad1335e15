"""Names for intermediate values, and marks on what a golden computes: the hooks through which the assay looks inside.

Operators call these functions in production, so this module imports nothing and each call costs next to nothing while
nobody listens. The assay sets `listener` while it traces a run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

_marks = threading.local()


class TargetError(ValueError):
    """A mistake in the declaration of a target; the message says what exists."""


class TargetTypeError(TargetError, TypeError):
    """A value of the wrong type in the declaration of a target."""


class Listener(Protocol):
    """What receives the stages of a run."""

    def visit(
        self, name: str, value: Tensor, at: tuple[object, ...] | None = None, mask: Tensor | None = None
    ) -> Tensor: ...

    def wants(self, name: str | None) -> bool: ...


# One listener at a time in a process, in whatever thread a stage is reached: autograd runs CUDA backwards in its own.
_listener: Listener | None = None


def stage(name: str, value: Tensor, *, at: tuple[object, ...] | None = None, mask: Tensor | None = None) -> Tensor:
    """value, recorded under `name` while the assay traces; in isolation the golden's value takes its place.

    Use it in goldens and candidates, forward and backward (`stage("h.grad", dh)`). Continue with the returned tensor: a
    stage whose return value is ignored can be observed, but not isolated. A repeated name becomes `name#2`.

    at: the place of a tile in the whole stage, an entry for each of its first axes: a slice, a whole number, or a
    tensor of indices. The tiles of a name are one stage: `stage("p", tile, at=(slice(r, r + 64), slice(c, c + 32)))`.
    mask: the elements of the tile that count, as in a store.

    In a Triton kernel: `p = assay.stage("p", p, at=(rows, cols), mask=mask)`. Compiled, it is `p = p`.
    """
    return value if _listener is None else _listener.visit(name, value, at, mask)


stage.__triton_builtin__ = True  # type: ignore[attr-defined]  # Triton's compiler calls it and takes what it returns


def tracing(name: str | None = None) -> bool:
    """Whether the assay wants stage `name` (without a name: any stage), so that a fused kernel can store it."""
    return False if _listener is None else _listener.wants(name)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside, `listener` receives every stage."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


@contextlib.contextmanager
def storage(name: str) -> Iterator[None]:
    """Inside, a golden may make tensors narrower than float64: it models the storage format `name`, e.g. "int4"."""
    _check_word("storage", "name", name)
    before = modelled_storage()
    _marks.storage = (*before, name)
    try:
        yield
    finally:
        _marks.storage = before


def modelled_storage() -> tuple[str, ...]:
    """The names of the `storage` blocks that this thread is in, outermost first."""
    return getattr(_marks, "storage", ())


@contextlib.contextmanager
def deciding(precision: str) -> Iterator[None]:
    """Inside, a golden takes a decision defined in `precision`, e.g. "float32": sums rounded to it, then sorted.

    The assay treats results made here as exact, however close two scores are, and never reorders the sums.
    """
    _check_word("deciding", "precision", precision)
    before = is_deciding()
    _marks.deciding = True
    try:
        with storage(precision):
            yield
    finally:
        _marks.deciding = before


def is_deciding() -> bool:
    return getattr(_marks, "deciding", False)


@contextlib.contextmanager
def constants() -> Iterator[None]:
    """Inside, a golden turns integer inputs into constants, e.g. codes into weights, in any number of steps.

    No rounding analysis follows these steps: the only error of a constant is its rounding to the compute precision.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def _check_word(function: str, argument: str, value: object) -> None:
    """Raises TargetError, so that the assay does not blame the golden's arithmetic for a mistake in a declaration."""
    if not isinstance(value, str) or not value:
        raise TargetError(f"{function}: {argument} must be a word such as 'int4' or 'float32', got {value!r}")
