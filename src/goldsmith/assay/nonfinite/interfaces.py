"""Protocols of a watch: WatchRecord, which text and page show, and Observer, which the dispatch mode calls."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .events import Event
from .norms import Norm
from .storage_history import Place


class WatchRecord(Protocol):
    """The record of a watch: its events, the number of events that it dropped (`more`), and the rows of norms."""

    events: list[Event]
    more: int

    @property
    def first(self) -> Event | None: ...

    @property
    def rows(self) -> list[Norm]: ...


class Observer(Protocol):
    """What the dispatch mode needs of a watch: facts about tensors and the place in the program; it takes events.

    listening   whether this step is watched
    sync        whether figures are read at once; otherwise flags stay on the device until the step ends
    remember    record the module and line of the operator that is about to run, for its backward
    place       the current place in the program
    source      the name of a tensor, for a user
    is_learned  whether a tensor is a parameter or a gradient
    report      take an event
    """

    listening: bool
    sync: bool

    def remember(self) -> None: ...

    def place(self) -> Place: ...

    def source(self, tensor: Tensor) -> str: ...

    def is_learned(self, tensor: Tensor) -> bool: ...

    def report(self, event: Event) -> None: ...
