"""The facts that a watch keeps about storages and operators, and who is responsible for an infinity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..execute.memory import _EMPTY
from .events import Frames

PURE_WRITERS = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "set_"}
UNDECLARED = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4)}
CONSTANT = "lift_fresh"  # torch.tensor(...), and assigning a number to a slice or an index, start with this operator
BACKWARD, FORWARD = "backward", "forward"
REPORTED, MEANT, FOREIGN = "reported", "meant", "foreign"


@dataclass
class StorageHistory:
    """Facts about a storage.

    writer    the operator that wrote it last, "" if it came from outside
    name      its name for a user, if it came from outside
    peak      max |x|; stays on the device until it is read, where nothing may wait
    fresh     created by `empty` and not judged yet
    meant     its infinities were written by the program itself
    reported  an event has been reported for its values
    mask      whether it looks like a mask (events.additive_mask); stays on the device until it is read
    under     the facts from before a part of it was written, until that part is judged
    """

    ref: StorageWeakRef
    writer: str
    peak: float | Tensor = 0.0
    fresh: bool = False
    meant: bool = False
    reported: bool = False
    name: str = ""
    mask: Tensor | None = None
    under: StorageHistory | None = None

    def part_of(self, before: StorageHistory) -> None:
        """Merge the facts from before a partial write, which still hold for the rest."""
        self.reported |= before.reported
        self.meant |= before.meant
        self.peak = larger(before.peak, self.peak)


def larger(a: float | Tensor, b: float | Tensor) -> float | Tensor:
    """The larger of two peaks, NaN above all; of a number and an unread tensor, the one that can reveal more."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, b) if (a.device, a.dtype) == (b.device, b.dtype) else b
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        number, tensor = (b, a) if isinstance(a, Tensor) else (a, b)
        return tensor if math.isfinite(number) else number
    return a if math.isnan(a) else b if math.isnan(b) else max(a, b)


def owner(history: StorageHistory | None, peak: float) -> str:
    """Who is responsible for a non-finite value: a reported event, the program itself, or code that nobody saw."""
    if history is not None and history.reported:
        return REPORTED
    return MEANT if history is not None and history.meant and math.isinf(peak) else FOREIGN


@dataclass(frozen=True)
class OperatorEffects:
    """How an operator treats its arguments: `writes` lists those that it changes; `reads`: it also reads them."""

    skip: bool
    constant: bool
    empty: bool
    name: str
    writes: tuple[int | str, ...]
    reads: bool
    many: bool  # lists of tensors in and out: result i comes from the i-th element of every list
    pointwise: bool  # an element of the result depends only on the elements at its position
    undeclared: tuple[int, ...]  # arguments that it changes although its schema does not say so


def effects_of(func: Any) -> OperatorEffects:
    schema = func._schema
    stem = schema.name.split("::")[1]
    writes: list[int | str] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(argument.name if argument.kwarg_only else place)
    view = not writes and any(r.alias_info is not None for r in schema.returns)
    reads = bool(writes) and stem not in PURE_WRITERS and not any(isinstance(w, str) for w in writes)
    many = stem.startswith(("_foreach", "_fused"))
    pointwise = torch.Tag.pointwise in func.tags and not writes and not many
    return OperatorEffects(
        view, stem == CONSTANT, func in _EMPTY, schema.name, tuple(writes), reads, many, pointwise,
        UNDECLARED.get(stem, ()),
    )  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A place in the program: the phase, the innermost module, the step, the user frames."""

    phase: str
    module: str
    step: int
    stack: Frames
