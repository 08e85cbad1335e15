"""How the parts of a watch see it: as a record to show, and as the observer that operators report to."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .events import Event
from .norms import Norm
from .storage_history import Place


class WatchRecord(Protocol):
    """What a watch has recorded: its events, how many more it dropped, and the rows of norms."""

    events: list[Event]
    more: int

    @property
    def first(self) -> Event | None: ...

    @property
    def rows(self) -> list[Norm]: ...


class Observer(Protocol):
    """What the dispatch mode asks a watch, and where it reports events.

    listening  whether this step is watched
    sync       whether figures are read at once; otherwise flags stay on the device until the step ends
    """

    listening: bool
    sync: bool

    def remember(self) -> None: ...

    def place(self) -> Place: ...

    def source(self, tensor: Tensor) -> str: ...

    def learned(self, tensor: Tensor) -> bool: ...

    def tell(self, event: Event) -> None: ...
