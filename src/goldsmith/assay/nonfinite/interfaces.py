"""Protocols of a watch: WatchRecord, which text and page show, Observer, which the dispatch mode calls, and Host."""

from __future__ import annotations

from typing import Protocol

import torch
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


class Host(Protocol):
    """What the checks of modules and optimizers need of a watch.

    arrange        put the dispatch mode on the stack or take it off, by what runs now
    is_own_thread  whether this is the thread that entered the watch, whose stack of modes it arranges
    before_optimizer  judge the step so far; whether the optimizer may run unseen
    has_event      whether this step has an event in a phase
    name_of        the name of a parameter
    place_of       the place of the forward operator with a number of autograd's
    source         the name of a tensor, for a user
    module_at      the module with a path, or None
    """

    events: list[Event]
    more: int
    stop: bool

    def arrange(self) -> None: ...

    def before_optimizer(self) -> bool: ...

    def is_own_thread(self) -> bool: ...

    def has_event(self, phase: str) -> bool: ...

    def name_of(self, parameter: Tensor) -> str: ...

    def module_at(self, path: str) -> torch.nn.Module | None: ...

    def place_of(self, number: int) -> Place: ...

    def source(self, tensor: Tensor) -> str: ...

    def place(self) -> Place: ...

    def report(self, event: Event) -> None: ...
