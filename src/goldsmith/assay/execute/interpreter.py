"""Detection of kernels in Triton's interpreter, and of its bfloat16 arithmetic, which matches no hardware.

Its stores truncate where hardware rounds; its `tl.dot` and its arithmetic treat the bits of bfloat16 as integers
(Triton 3.6). Such results say nothing about a kernel and are not judged. A plain torch candidate in bfloat16 is
judged: only kernels that really ran in the interpreter count.

The interpreter runs the programs of a launch one after another, by their numbers. A GPU promises no order, so that
results which need the interpreter's are wrong there now and then: a program overwrites what another one has written,
adds to what another one sets to zero, or reads what another one has yet to write. Hence the other order.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .interpreter_launch import speed_up

MODULE = "triton.runtime.interpreter"
NO_BFLOAT16 = (
    "bfloat16 was not judged: the kernel ran in Triton's interpreter, whose bfloat16 stores truncate where hardware "
    "rounds and whose tl.dot on bfloat16 is garbage; check it on a GPU, or in float32 here"
)
_READS = ("create_load", "create_masked_load", "create_atomic_cas", "create_atomic_rmw")
_MOST_READS = 20_000  # of one program, which take it about two seconds


@dataclass
class Interpreted:
    """What ran in Triton's interpreter.

    launches: the number of kernels; bfloat16: whether one of them read or multiplied bfloat16 tensors.
    """

    launches: int = 0
    bfloat16: bool = False


@contextmanager
def watching() -> Iterator[Interpreted]:
    """Context that records every launch in the interpreter, and restores Triton afterwards."""
    seen, module = Interpreted(), _module()
    executor, builder = getattr(module, "GridExecutor", None), getattr(module, "interpreter_builder", None)
    if executor is None or builder is None:
        yield seen
        return
    undo = speed_up(module)
    launch, dot = executor.__call__, builder.create_dot
    within = "create_dot" in vars(builder)  # a nested run: restore the outer one's

    def launched(self: object, *args: object, **kwargs: object) -> Any:
        seen.launches += 1
        seen.bfloat16 |= any(_is_bfloat16(a) for a in (*args, *kwargs.values()))
        return launch(self, *args, **kwargs)

    def multiplied(a: Any, b: Any, *rest: object, **named: object) -> Any:
        seen.bfloat16 |= any(getattr(x.dtype, "scalar", None) == module.tl.bfloat16 for x in (a, b))
        return dot(a, b, *rest, **named)

    executor.__call__, builder.create_dot = launched, multiplied
    try:
        yield seen
    finally:
        executor.__call__ = launch
        if within:
            builder.create_dot = dot
        else:
            del builder.create_dot
        undo()


class WaitsForOthers(RuntimeError):
    """A program that reads memory so often that it may wait for another one, which runs after it."""


@contextmanager
def programs_backwards() -> Iterator[None]:
    """Context in which the interpreter runs the programs of a launch from the last to the first.

    A program that waits for another one raises WaitsForOthers, which the interpreter turns into its own error.
    """
    builder = getattr(_module(), "interpreter_builder", None)
    if builder is None or not all(hasattr(builder, name) for name in ("set_grid_idx", *_READS)):
        yield
        return
    left = [0]
    changes: dict[str, Callable[..., object]] = {n: partial(_counted, getattr(builder, n), left) for n in _READS}
    changes["set_grid_idx"] = partial(_last_first, builder, builder.set_grid_idx, left)
    before = {name: vars(builder)[name] for name in changes if name in vars(builder)}
    vars(builder).update(changes)
    try:
        yield
    finally:
        for name in changes:
            del vars(builder)[name]
        vars(builder).update(before)


def _last_first(builder: object, place: Callable[..., None], left: list[int], *numbers: int) -> None:
    left[0] = _MOST_READS
    sizes: tuple[int, ...] = vars(builder)["grid_dim"]
    place(*(size - 1 - number for size, number in zip(sizes, numbers, strict=True)))


def _counted(read: Callable[..., object], left: list[int], *args: object, **kwargs: object) -> object:
    left[0] -= 1
    if left[0] < 0:
        raise WaitsForOthers(f"more than {_MOST_READS} reads in one program")
    return read(*args, **kwargs)


def distrusted(seen: Interpreted, compute: torch.dtype) -> bool:
    """Whether results may come from the interpreter's bfloat16 arithmetic rather than from the kernel."""
    return seen.bfloat16 or (seen.launches > 0 and compute == torch.bfloat16)


def _module() -> Any:
    """The interpreter if kernels may run in it, else None; Triton reads the variable when a kernel is defined."""
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    if os.environ.get("TRITON_INTERPRET", "0").lower() not in ("1", "true", "on", "yes"):
        return None
    try:
        return importlib.import_module(MODULE)
    except ImportError:  # no Triton, or one without an interpreter
        return None


def _is_bfloat16(argument: object) -> bool:
    """Whether an argument is bfloat16: a tensor, one in a tuple, or the base of a descriptor."""
    if isinstance(argument, tuple | list):
        return any(_is_bfloat16(a) for a in argument)
    base = getattr(argument, "base", argument)
    tensor = base if isinstance(base, Tensor) else argument
    return isinstance(tensor, Tensor) and tensor.dtype == torch.bfloat16
