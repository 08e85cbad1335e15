"""Whether a golden computes finite numbers alone: the rules for NaN and Inf then change no bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...core.tracing import is_deciding
from ..support.dispatch_mode import DispatchMode
from ..support.torch_settings import default_dtype, in_one_order, threads_for
from .rule_lookup import decided, treatment_of
from .storage_errors import tensors


def finite_throughout(fn: Callable[[dict[str, Tensor]], object], leaves: Mapping[str, Tensor]) -> bool:
    """Whether `fn`, run as `running_bounds` runs it, computes no NaN and no Inf. False where this is not certain."""
    mode = _FiniteValues()
    leaves = {name: t.detach().clone() for name, t in leaves.items()}
    with default_dtype(torch.float64), threads_for(leaves), in_one_order(leaves):
        with mode:
            fn(leaves)
        return not mode.unsure and (not mode.sums or bool(torch.isfinite(torch.stack(mode.sums)).all()))


class _FiniteValues(DispatchMode):
    """Adds up every tensor that a rule would see: with a NaN or an Inf among the terms, the sum is NaN or Inf."""

    def __init__(self) -> None:
        super().__init__()
        self.unsure = False
        self.sums: list[Tensor] = []
        self._seen: set[int] = set()  # storages whose numbers have been added up

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        treatment = decided(treatment_of(func)) if is_deciding() else treatment_of(func)
        if treatment.composed is not None:
            with self:
                y = treatment.composed(*args, **kwargs)
                if y is not NotImplemented:
                    return args[0].copy_(y) if treatment.inplace else y
        self._add(t for t in tensors(args, kwargs) if t.untyped_storage()._cdata not in self._seen)
        y = func(*args, **kwargs)
        if not treatment.view:
            self._add(t for t in (y if isinstance(y, tuple | list) else (y,)) if isinstance(t, Tensor))
        return y

    def _add(self, new: Iterable[Tensor]) -> None:
        for t in new:
            self._seen.add(t.untyped_storage()._cdata)
            self.unsure |= t.is_complex()
            if t.is_floating_point() and t.numel():
                self.sums.append(t.detach().to(torch.float64).sum())
