"""tile_recording: records every operation of Triton kernels that run in the interpreter."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .recorder import Place, Recorder

_INTERPRETER, _JIT = "triton.runtime.interpreter", "triton.runtime.jit"
Function = Callable[..., Any]
_STEP = "_goldsmith_step"  # attribute of a handle
_MOVES = frozenset(
    "create_expand_dims create_broadcast create_splat create_unsplat create_trans create_reshape create_cat "
    "create_join create_split create_fp_ext create_fp_trunc create_fp_to_fp create_bitcast create_gather".split()
)
_LOOSE = {"create_select": (0,), "create_gather": (1,)}


@contextmanager
def tile_recording(recorder: Recorder) -> Iterator[None]:
    """Context in which kernels in the interpreter are recorded; without Triton it does nothing."""
    if _JIT not in sys.modules:
        yield
        return
    module = importlib.import_module(_INTERPRETER)
    builder, executor, operations = module.interpreter_builder, module.GridExecutor, module.ReduceScanOpInterface
    tiles = _Tiles(recorder, module)
    names = [n for n in dir(builder) if n.startswith("create_") and callable(getattr(builder, n))]
    before = {n: vars(builder).get(n) for n in names}
    launch, reduce, index = executor.__call__, operations.apply, vars(builder).get("set_grid_idx")
    for name in names:
        setattr(builder, name, tiles.wrapped(name, getattr(builder, name)))
    builder.set_grid_idx = tiles.grid(builder.set_grid_idx)
    executor.__call__, operations.apply = tiles.launch(launch), tiles.reduce(reduce)
    try:
        yield
    finally:
        executor.__call__, operations.apply = launch, reduce
        for name, value in {**before, "set_grid_idx": index}.items():
            delattr(builder, name)
            if value is not None:
                setattr(builder, name, value)


class _Tiles:
    def __init__(self, recorder: Recorder, module: Any):
        self.recorder, self.handle = recorder, module.TensorHandle
        self.inside = 0  # calls of the builder within another one, or within a reduction, are its own business
        self.launches = 0

    def wrapped(self, name: str, function: Function) -> Function:
        load, store = "load" in name and "pointer" not in name, "store" in name and "pointer" not in name
        atomic = name == "create_atomic_rmw"

        def call(*args: Any, **named: object) -> object:
            if self.inside:
                return function(*args, **named)
            self.inside += 1
            try:
                out = function(*args, **named)
            finally:
                self.inside -= 1
            if load:
                self._loaded(args, out)
            elif store or atomic:
                self._stored(name, args)
            else:
                self._made(name, args, out)
            return out

        return call

    def _made(self, name: str, args: tuple, out: object) -> None:
        loose_at = _LOOSE.get(name, ())
        strong, loose = set[int](), set[int]()
        for i, argument in enumerate(args):
            for handle in argument if isinstance(argument, list | tuple) else [argument]:
                step = getattr(handle, _STEP, None)
                if step is not None:
                    (loose if i in loose_at else strong).add(step)
        where = self.recorder.place()
        moves, operation = name in _MOVES, name.removeprefix("create_")
        for i, handle in enumerate(out if isinstance(out, tuple) else (out,)):
            if isinstance(handle, self.handle):
                self._mark(handle, where, f"{operation}.{i}" if i else operation, strong, loose, moves=moves)

    def _mark(
        self, handle: Any, where: Place, operation: str, strong: set[int], loose: set[int], *, moves: bool = False
    ) -> None:
        step = self.recorder.add(
            where,
            operation,
            _numbers(handle),
            strong,
            loose,
            roundoff=_roundoff(handle),
            factory=not strong,
            moves=moves,
        )
        setattr(handle, _STEP, step)

    def _loaded(self, args: tuple, out: object) -> None:
        pointers, mask = args[0], args[1]
        addresses = getattr(pointers, "data", None)
        if addresses is None or not isinstance(out, self.handle):
            return
        kept = addresses
        if isinstance(mask, self.handle):
            kept = addresses[mask.data.astype(bool)] if mask.data.shape == addresses.shape else addresses
        strong = self.recorder.read_at(int(kept.min())) if kept.size else set()
        loose = {s for h in args[:3] if (s := getattr(h, _STEP, None)) is not None}
        self._mark(out, self.recorder.place(), "load", strong, loose, moves=True)

    def _stored(self, name: str, args: tuple) -> None:
        pointers, value, mask = args[:3] if name != "create_atomic_rmw" else args[1:4]
        addresses = getattr(pointers, "data", None)
        if addresses is None or not isinstance(value, self.handle):
            return
        numbers = _numbers(value)
        kept = addresses.reshape(-1)
        if isinstance(mask, self.handle) and mask.data.size == kept.size:
            lanes = mask.data.reshape(-1).astype(bool)
            kept = kept[lanes]
            numbers = None if numbers is None or numbers.numel() != lanes.size else numbers[torch.from_numpy(lanes)]
        strong = {s for h in (value,) if (s := getattr(h, _STEP, None)) is not None}
        loose = {s for h in (pointers, mask) if (s := getattr(h, _STEP, None)) is not None}
        operation = name.removeprefix("create_").removeprefix("masked_")
        if name == "create_atomic_rmw":
            numbers, operation = None, "atomic"
        step = self.recorder.add(
            self.recorder.place(), operation, numbers, strong, loose, moves=name != "create_atomic_rmw",
            roundoff=_roundoff(value),
        )  # fmt: skip
        if kept.size:
            self.recorder.write_at(int(kept.min()), step)

    def reduce(self, function: Function) -> Function:
        def apply(operation: Any, tensors: object) -> object:
            if self.inside or not isinstance(tensors, tuple):
                return function(operation, tensors)
            self.inside += 1
            try:
                out = function(operation, tensors)
            finally:
                self.inside -= 1
            strong = {s for t in tensors if (s := getattr(t.handle, _STEP, None)) is not None}
            name = getattr(getattr(operation.combine_fn, "fn", operation.combine_fn), "__name__", "")
            name = {"_sum_combine": "sum", "_elementwise_max": "max", "_elementwise_min": "min"}.get(name, "reduce")
            where = self.recorder.place()
            for i, tensor in enumerate(out):
                self._mark(tensor.handle, where, f"{name}.{i}" if i else name, strong, set())
            return out

        return apply

    def grid(self, function: Function) -> Function:
        def set_grid_idx(*index: int) -> object:
            self.recorder.program = (self.launches, *index)
            return function(*index)

        return set_grid_idx

    def launch(self, function: Function) -> Function:
        def launched(executor: object, *args: object, **named: object) -> object:
            self.launches += 1
            recorder = self.recorder
            recorder.launches += 1
            for tensor in (*args, *named.values()):
                if isinstance(tensor, Tensor) and tensor.numel():
                    recorder.memory(tensor)
            recorder.paused = True  # torch's operations of the launch itself
            try:
                return function(executor, *args, **named)
            finally:
                recorder.paused, recorder.program = False, None

        return launched


def _numbers(handle: Any) -> Tensor | None:
    """The numbers of a tile of reals; None for indices, masks and pointers."""
    data = handle.data
    if data.dtype.kind != "f" or not data.size:
        return None
    return torch.from_numpy(data.copy()).reshape(-1)  # a scan in reverse has negative strides


def _roundoff(handle: Any) -> float:
    kind = {"f2": 2.0**-10, "f4": 2.0**-23, "f8": 2.0**-52}
    return kind.get(handle.data.dtype.str[1:], 0.0)
