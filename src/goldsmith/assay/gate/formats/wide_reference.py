"""WideReference: a reference that names dtypes in its source, run as a golden: in float64 throughout.

FlashInfer-Bench's references compute in float32 and cast their results, or compute in their inputs' dtypes. Here every
cast to a narrower dtype is one to float64. Candidates may round to 16 bits what a reference rounds, by a cast or by an
operator whose result has this dtype, and the operands of products of matrices, which tensor cores take in 16 bits. All
of these are stages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ....core.tracing import stage
from ..bad_problem import BadProblem

NARROW = (torch.float32, torch.float16, torch.bfloat16)
SIXTEEN = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
PRODUCTS: frozenset[object] = frozenset(
    getattr(owner, name)
    for owner in (torch, torch.Tensor, torch.nn.functional)
    for name in ("matmul", "mm", "bmm", "einsum", "linear", "__matmul__")
    if hasattr(owner, name)
)
Call = tuple[str, int]  # function of the reference, and place in its code
CASTS = {torch.Tensor.float: torch.float32, torch.Tensor.half: torch.float16, torch.Tensor.bfloat16: torch.bfloat16}


class WideReference:
    """The function `run` of a reference's source.

    roundings: call of torch -> (stage, "float16" or "bfloat16"), products: call -> stage of its operands, both after
    `look_for_roundings`. A call is a place in the source, so that each turn of a loop has the same.
    """

    def __init__(self, source: str, name: str) -> None:
        self.name, self.file = name, f"<reference of {name}>"
        self.roundings: dict[Call, tuple[str, str]] = {}
        self.products: dict[Call, str] = {}
        namespace: dict[str, object] = {"__name__": f"reference_{name}"}
        try:
            exec(compile(source, self.file, "exec"), namespace)
        except Exception as error:
            raise BadProblem(f"{name}: the reference raised {type(error).__name__}: {error}") from error
        self.run: Callable[..., object] = namespace.get("run")  # type: ignore[assignment]
        if not callable(self.run):
            raise BadProblem(f"{name}: the reference must define a function run")

    def golden(self, order: tuple[str, ...]) -> Callable[..., object]:
        """A golden of the inputs of these names."""

        def golden(**values: object) -> object:
            with _Wide(self.file, {c: n for c, (n, _) in self.roundings.items()}, self.products):
                result = self.run(*(values[name] for name in order))
            return _as_tensors(result)

        golden.__name__ = self.name
        golden.plain = lambda **values: _as_tensors(self.run(*(values[n] for n in order)))  # type: ignore[attr-defined]
        return golden

    def look_for_roundings(self, values: Mapping[str, object]) -> None:
        """Runs the reference on one case, and finds its products, and results in 16 bits with which it goes on."""
        wide = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in values.items()}
        recorder: _Watching = _Wide(self.file, {}, {})
        with torch.no_grad(), recorder:
            try:
                result = self.run(*wide.values())
            except Exception as error:
                raise BadProblem(f"{self.name}: the reference raised {type(error).__name__}: {error}") from error
        self.products = {call: f"operand_{i}" for i, call in enumerate(recorder.products)}
        with torch.no_grad(), suppress(Exception), _AsWritten(self.file) as written:  # of operators that lack 16 bits
            result, recorder = self.run(*values.values()), written
        between = recorder.used.keys() - {id(t) for t in _flat(result)}
        rounded = {call: dtype for call, t, dtype in recorder.seen if id(t) in between}
        self.roundings = {call: (f"rounded_{i}", dtype) for i, (call, dtype) in enumerate(rounded.items())}


class _Watching(TorchFunctionMode):
    """Mode that looks at the calls of torch in a file.

    seen: calls that round to 16 bits, their results, and the dtype; products: those of matrices; used: the tensors that
    further ones are computed from, other than by storing them, by id; they are kept, so that no later one gets the id.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file
        self.seen: list[tuple[Call, Tensor, str]] = []
        self.products: dict[Call, None] = {}
        self.used: dict[int, Tensor] = {}

    def call(self) -> Call:
        frame = sys._getframe(2)
        while frame.f_code.co_filename != self.file and frame.f_back is not None:
            frame = frame.f_back
        return frame.f_code.co_qualname, frame.f_lasti

    def use(self, func: object, args: Sequence[object], result: object) -> None:
        if func is not torch.Tensor.copy_ and _flat(result):
            self.used |= {id(t): t for t in _flat([*args, *(t for a in args for t in _flat(a))])}


class _AsWritten(_Watching):
    """Mode that finds results in 16 bits in the dtypes of the reference."""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: dict[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        dtype = SIXTEEN.get(result.dtype) if isinstance(result, Tensor) else None
        if (
            isinstance(result, Tensor) and dtype and _storage(result) not in [_storage(t) for t in _flat(args)]
        ):  # a view rounds nothing
            self.seen.append((self.call(), result, dtype))
        self.use(func, args, result)
        return result


class _Wide(_Watching):
    """Mode in which narrow dtypes in arguments are float64. Results of some calls, and operands, are stages."""

    def __init__(self, file: str, stages: Mapping[Call, str], operands: Mapping[Call, str]) -> None:
        super().__init__(file)
        self.stages, self.operands = stages, operands

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, call = dict(kwargs or {}), self.call()
        narrow, arguments = CASTS.get(func), args
        if narrow is not None:
            func, args = torch.Tensor.double, args[:1]
        else:
            asked = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
            narrow = next((a for a in asked if a in NARROW), None)
            if narrow is not None:
                args = tuple(_widened(a) for a in args)
                kwargs = {k: _widened(v) for k, v in kwargs.items()}
        if func in PRODUCTS:
            self.products[call] = None
            if call in self.operands:
                args = tuple(stage(self.operands[call], a) if isinstance(a, Tensor) else a for a in args)
        result = func(*args, **kwargs)
        sixteen = None if narrow is None else SIXTEEN.get(narrow)
        cast = args and isinstance(args[0], Tensor) and args[0].is_floating_point() and isinstance(result, Tensor)
        if cast and sixteen and not self.stages:
            result = result.clone()  # torch returns its argument where the dtype stays
            self.seen.append((call, result, sixteen))
        self.use(func, arguments, result)
        return stage(self.stages[call], result) if call in self.stages else result


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _widened(value: object) -> object:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def _flat(result: object) -> list[Tensor]:
    values = (
        result.values() if isinstance(result, Mapping) else result if isinstance(result, list | tuple) else [result]
    )
    return [v for v in values if isinstance(v, Tensor)]


def _as_tensors(result: object) -> object:
    """Python numbers as tensors without dimensions."""
    if isinstance(result, bool | int | float):
        return torch.tensor(result, dtype=torch.float64 if isinstance(result, float) else None)
    if isinstance(result, Mapping):
        return {name: _as_tensors(value) for name, value in result.items()}
    if isinstance(result, list | tuple):
        return tuple(_as_tensors(value) for value in result)
    return result
