"""Ranks that are simulated in this process: a tensor holds the values of all ranks, and collectives exchange them.

For functions of DTensors only: a step that asks which rank it is on would be told 0. It rests on torch's
LocalTensorMode, which is private to torch; where torch has none, SimulatedRanks raises RuntimeError. Uneven shards and
sharded experts often need numbers that torch cannot simulate: a TargetError says so, which is no verdict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from ...core.tracing import TargetError
from .pool import RankError, in_words
from .rank_run import MESHES as STEP_MESHES
from .sharded import MESHES


class SimulatedRanks:
    """Like RankPool, without processes: starts at once, and needs no network. One at a time, on the CPU."""

    device = "cpu"

    def __init__(self, world: int) -> None:
        if not isinstance(world, int) or world < 1:
            raise ValueError(f"SimulatedRanks: world={world!r}, expected a number of ranks of at least 1")
        if distributed.is_initialized():
            raise RuntimeError("SimulatedRanks: this process has a process group; close it, or use it")
        try:
            from torch.distributed._local_tensor import LocalTensorMode
            from torch.testing._internal.distributed.fake_pg import FakeStore
        except ImportError as error:
            raise RuntimeError(f"SimulatedRanks: torch {torch.__version__} cannot simulate ranks: {error}") from error
        self.world, self._mode = world, LocalTensorMode
        distributed.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        self.alive = True

    def run(
        self, function: Callable[..., object], arguments: Sequence[tuple[object, ...]], *, limit_s: float | None = None
    ) -> list[object]:
        """What the function returns on every rank. Raises RankError if it raises, TargetError if torch cannot."""
        if not self.alive:
            raise RankError("the ranks have ended")
        try:
            with torch.enable_grad(), self._mode(self.world):
                result = function(*_joined(arguments))
        except Exception as error:
            if "SymInt" in str(error) or "LocalInt" in str(error):  # such as sizes of uneven shards
                raise TargetError(
                    f"torch {torch.__version__} cannot simulate numbers that differ between ranks here ({error}); use "
                    "a RankPool"
                ) from error
            raise RankError(f"on all ranks: {in_words(error)}") from error
        return [_of_rank(result, rank) for rank in range(self.world)]

    def close(self) -> None:
        """Ends the group of this process."""
        if self.alive:
            self.alive = False
            for meshes in (STEP_MESHES, MESHES):
                meshes.clear()
            distributed.destroy_process_group()

    def __enter__(self) -> SimulatedRanks:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def _joined(values: Sequence[Any]) -> Any:
    """One value of the ranks' values: tensors that differ become one that holds them all."""
    first = values[0]
    if all(value is first for value in values):
        return first
    if isinstance(first, Tensor):
        from torch.distributed._local_tensor import LocalTensor

        return LocalTensor(dict(enumerate(values)))
    if isinstance(first, tuple):
        return tuple(_joined(part) for part in zip(*values, strict=True))
    if isinstance(first, dict):
        return {name: _joined([value[name] for value in values]) for name in first}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        fields = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(first, **{name: _joined([getattr(v, name) for v in values]) for name in fields})
    return first


def _of_rank(value: object, rank: int) -> object:
    if isinstance(value, Tensor):
        parts: Mapping[int, Tensor] | None = getattr(value, "_local_tensors", None)
        return value if parts is None else parts[rank]
    if isinstance(value, (tuple, list)):
        return type(value)(_of_rank(part, rank) for part in value)
    if isinstance(value, dict):
        return {name: _of_rank(part, rank) for name, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _of_rank(getattr(value, name), rank) for name in fields})
    return value
