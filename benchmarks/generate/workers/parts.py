"""Where the time of a decoding step goes: wall time of the model's parts, each without the parts inside it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

REST, OUTSIDE = "the rest of the model", "outside the model"


class PartClock:
    """Seconds by part since `start`; parts begin and end with their modules' calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def start(self) -> None:
        self.seconds.clear()
        self._since = time.perf_counter()

    def enter(self, part: str) -> None:
        self._count()
        self._open.append(part)

    def leave(self) -> None:
        self._count()
        self._open.pop()

    def _count(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1] if self._open else OUTSIDE] += now - self._since
        self._since = now


@contextmanager
def timed_parts(model: nn.Module) -> Iterator[PartClock]:
    """The clock of a model's parts; hooks are removed at the end. They take about 2 us a module."""
    clock, hooks = PartClock(), []
    for name, module in model.named_modules():
        part = part_of(name, module)
        if part is not None:
            hooks.append(module.register_forward_pre_hook(lambda *_, part=part: clock.enter(part)))
            hooks.append(module.register_forward_hook(lambda *_: clock.leave()))
    clock.start()
    try:
        yield clock
    finally:
        clock._count()
        for hook in hooks:
            hook.remove()


def part_of(name: str, module: Any) -> str | None:
    """The part that a module belongs to, by the kind of its class; None for what is counted with its parent."""
    kind, last = type(module).__name__, name.rpartition(".")[2]
    if not name:
        return REST
    if kind.endswith("Experts"):
        return "experts"
    if "Norm" in kind:
        return "norms"
    if "Router" in kind or last == "gate":
        return "router"
    if isinstance(module, nn.Linear):
        return "head" if last == "lm_head" else "dense products"
    if kind.endswith("Attention"):
        return "attention besides products"
    return None
