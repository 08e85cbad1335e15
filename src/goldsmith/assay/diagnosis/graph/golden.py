"""Golden: a golden that can run with changes, in full or up to a stage."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...golden.golden_results import GoldenResults
from ...support.torch_settings import default_dtype
from .decompositions import Opened
from .recording import Listening


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences warnings of a changed golden: the change causes them, e.g. a deviation of one number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Reached(Exception):
    """Ends a run; not an error."""

    def __init__(self, value: Tensor):
        self.value = value


class Golden(GoldenResults):
    """The golden, which stops at the wanted stage and passes the names of tensors to the mode that listens.

    opened: fused torch functions run as smaller steps, with autograd's backward of those. If a gradient is wrong and
    the forward is right, torch's own backward is the better place to search, since kernels write that by hand.
    """

    def __init__(self, ref: GoldenResults, *, opened: bool = False):
        super().__init__(ref.material, ref.run, ref.decisions, ref.seed)
        self.opened = opened
        self.until = ""
        self.mode: Listening | None = None

    def _store(self, name: str, value: Tensor) -> Tensor:
        value = super()._store(name, value)
        if self.mode is not None:
            self.mode.call_it(value, name)
        if name == self.until and (self.mode is None or not name.endswith(".grad") or self.mode.backward):
            raise _Reached(value.detach().clone())
        return value

    def _gradients(self, *args: Any) -> dict[str, Tensor]:
        if self.mode is not None:
            self.mode.backward = True
        return super()._gradients(*args)

    def run_under(
        self,
        mode: Listening,
        leaves: Mapping[str, Tensor],
        until: str = "",
        scalars: Mapping[str, object] | None = None,
    ) -> dict[str, Tensor]:
        """All tensors of a run, or `until` alone."""
        self.mode, self.until = mode, until.removeprefix("saved.")
        own = self.material
        self.material = replace(own, scalars={**own.scalars, **scalars}) if scalars else own
        supply = {n: t.clone() for n, t in leaves.items()}
        for n, t in supply.items():
            mode.call_it(t, n, leaf=True)
        try:
            with _quiet(), default_dtype(torch.float64), Opened() if self.opened else nullcontext(), mode:
                return self.evaluate(supply)
        except _Reached as reached:
            return {until: reached.value}
        finally:
            self.mode, self.until, self.material = None, "", own
