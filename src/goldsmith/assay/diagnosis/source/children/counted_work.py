"""Work: the number of elements that torch's operators, and Triton's loads and stores, read and write in a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ....declare.target import Target
from ....execute.interpreter import MODULE
from ....support.dispatch_mode import DispatchMode

Counts = tuple[int, int, int]  # elements of torch's operators, of Triton's tiles, and those that no mask leaves out
_ENOUGH = 1.5


class CountedWork(DispatchMode):
    """Counts elements in the calls of a target and in autograd's backwards, while it is active.

    Views count nothing, and the work of C kernels is not counted.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.elements = self.tiles = self.kept = self.calls = 0
        bound = target.bound
        object.__setattr__(target, "bound", lambda *names: partial(self._called, bound(*names)))

    def _called(self, function: Callable[..., object], *args: Any) -> object:
        self.calls += 1
        try:
            return function(*args)
        finally:
            self.calls -= 1

    @property
    def counts(self) -> Counts:
        return self.elements, self.tiles, self.kept

    @contextmanager
    def of_tiles(self) -> Iterator[None]:
        """Context in which the loads and stores of interpreted kernels count, too."""
        builder = getattr(sys.modules.get(MODULE), "interpreter_builder", None)
        if builder is None:
            yield
            return
        before = {}
        for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
            before[name] = vars(builder).get(name)
            setattr(builder, name, partial(self._moved, getattr(builder, name), place))
        try:
            yield
        finally:
            for name, value in before.items():
                delattr(builder, name)
                if value is not None:
                    setattr(builder, name, value)

    def _moved(self, function: Callable[..., object], place: int, *args: Any) -> object:
        mask = args[place].data
        self.tiles += mask.size
        self.kept += int(mask.astype(bool).sum())
        return function(*args)

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and (self.calls or torch._C._current_graph_task_id() >= 0):
            tensors = [t for t in tree_leaves((args, kwargs or {}, out)) if isinstance(t, Tensor)]
            self.elements += sum(t.numel() for t in tensors)
        return out


def more_work(own: Counts, edited: Counts) -> float:
    """How many times the work an edit makes. Tiles count if most of what is added is masked: as with a larger block."""
    ratio = edited[0] / own[0] if own[0] else 1.0
    if own[1] and own[2] and edited[2]:
        tiles, waste = edited[1] / own[1], edited[1] / edited[2] * own[2] / own[1]
        ratio = max(ratio, tiles if min(tiles, waste) > _ENOUGH else 1.0)
    return ratio
