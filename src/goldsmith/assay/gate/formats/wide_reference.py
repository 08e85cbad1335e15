"""WideReference: a reference that names dtypes in its source, run as a golden: in float64 throughout.

FlashInfer-Bench's references compute in float32 and cast their results. Here every cast to a narrower dtype is one to
float64. Where a reference rounds an intermediate result to 16 bits, candidates may do so too, so it becomes a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ....core.tracing import stage
from ..bad_problem import BadProblem

NARROW = (torch.float32, torch.float16, torch.bfloat16)
SIXTEEN = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
CASTS = {torch.Tensor.float: torch.float32, torch.Tensor.half: torch.float16, torch.Tensor.bfloat16: torch.bfloat16}


class WideReference:
    """The function `run` of a reference's source.

    roundings: stage -> "float16" or "bfloat16", after `look_for_roundings`.
    """

    def __init__(self, source: str, name: str) -> None:
        self.name = name
        self.roundings: dict[str, str] = {}
        namespace: dict[str, object] = {"__name__": f"reference_{name}"}
        try:
            exec(compile(source, f"<reference of {name}>", "exec"), namespace)
        except Exception as error:
            raise BadProblem(f"{name}: the reference raised {type(error).__name__}: {error}") from error
        self.run: Callable[..., object] = namespace.get("run")  # type: ignore[assignment]
        if not callable(self.run):
            raise BadProblem(f"{name}: the reference must define a function run")

    def golden(self, order: tuple[str, ...]) -> Callable[..., object]:
        """A golden of the inputs of these names."""

        def golden(**values: object) -> object:
            with _Wide(self.roundings):
                result = self.run(*(values[name] for name in order))
            return _as_tensors(result)

        golden.__name__ = self.name
        golden.plain = lambda **values: _as_tensors(self.run(*(values[n] for n in order)))  # type: ignore[attr-defined]
        return golden

    def look_for_roundings(self, values: Mapping[str, object]) -> None:
        """Runs the reference on one case, and finds the casts to 16 bits whose results it goes on with."""
        wide = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in values.items()}
        with _Wide(None) as mode, torch.no_grad():
            try:
                result = self.run(*wide.values())
            except Exception as error:
                raise BadProblem(f"{self.name}: the reference raised {type(error).__name__}: {error}") from error
        returned = {id(t) for t in _flat(result)}
        self.roundings = {name: dtype for name, (t, dtype) in mode.seen.items() if id(t) not in returned}


class _Wide(TorchFunctionMode):
    """Inside, narrow dtypes in arguments are float64. Casts to 16 bits are numbered, and are stages if listed."""

    def __init__(self, stages: Mapping[str, str] | None) -> None:
        super().__init__()
        self.stages, self.count = stages, 0
        self.seen: dict[str, tuple[Tensor, str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        narrow = CASTS.get(func)
        if narrow is not None:
            func, args = torch.Tensor.double, args[:1]
        else:
            asked = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
            narrow = next((a for a in asked if a in NARROW), None)
            if narrow is not None:
                args = tuple(_widened(a) for a in args)
                kwargs = {k: _widened(v) for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        sixteen = None if narrow is None else SIXTEEN.get(narrow)
        cast = args and isinstance(args[0], Tensor) and args[0].is_floating_point() and isinstance(result, Tensor)
        return self._rounded(result, sixteen) if cast and sixteen else result

    def _rounded(self, result: Tensor, dtype: str) -> Tensor:
        name = f"rounded_{self.count}"
        self.count += 1
        if self.stages is None:
            result = result.clone()  # torch returns its argument where the dtype stays
            self.seen[name] = result, dtype
            return result
        return stage(name, result) if name in self.stages else result


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
