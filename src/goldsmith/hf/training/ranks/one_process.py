"""The exchanges of a run that has one process: each returns what it received."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from ....experts import PackedExperts
from ..records.checkpoints import TrainingCheckpoint

T = TypeVar("T")


class OneProcess:
    """The only rank of a run; `Ranks` has the same methods for several."""

    rank, world, local_world = 0, 1, 1

    @property
    def first(self) -> bool:
        """Whether this rank writes files and shows progress."""
        return self.rank == 0

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks, in the order of ranks."""
        return [value]

    def any(self, value: bool) -> bool:
        return True in self.gathered(value)

    def checkpoint(self, read: Callable[[], TrainingCheckpoint | None]) -> TrainingCheckpoint | None:
        """What `read` returns on the first rank; other ranks do not call it."""
        return read()

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes its sum over all ranks, added in the order of ranks."""

    def share(self, make: Callable[[], PackedExperts]) -> PackedExperts:
        """The packed experts that `make` returns, once for all ranks of a machine."""
        return make()

    def leave(self, message: str) -> bool:
        """Ends the run on all ranks. Returns whether no other rank has done so with the same message."""
        return True

    def finish(self) -> None:
        """Waits until all ranks have come to the end."""
