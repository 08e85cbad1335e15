"""Op: the declaration of one operator: its name, schema, reference, stages and backends.

There is one instance per operator, in `<family>/<op>/op.py`. Everything else (verify, bench, doctor, the tests, the
tables in the documentation) walks `Op.all()`. Autograd, fake tensors and `torch.compile` are written here once, through
`torch.library`; a backend is a module with `forward` and, if it has one, `backward`:

    forward(<inputs>, *, <options>) -> every result of the schema, in its order
    backward(grads, tensors, options, needs) -> {input: gradient}
    unsupported(tensors, options) -> a sentence, or None        (optional: why it cannot run this call)
    LAUNCHES_ONLY = True      (optional: it only allocates memory and calls `run`; both are repeated, see signatures.py)

The names of the axes give every operator its shape checks, its results without numbers (for `torch.compile`) and its
placements on DTensors. Beside the `Op` and the public function, `<op>/op.py` may define what names cannot say:

    check(<inputs>, *, <options>) -> None     raises for wrong arguments (eager: before the backend runs; compiled:
                                              while the graph is traced); it calls `check_axes` itself
    fake(<inputs>, *, <options>) -> results   empty tensors of the right shapes, dtypes and devices

`check` and `unsupported` read the types, shapes, dtypes, layouts and devices of tensors and the options, nothing else:
a call that has all of them in common with an earlier one is not checked again (signatures.py).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import autograd, native, sharding
from .axes import Axes, check_axes, fake, parse_axes
from .device import BackendUnavailable, UnsupportedCall, grouped_unavailable, triton_unavailable
from .signatures import keep, repeated, signature

FAMILIES = ("mhc", "router", "experts")  # packages whose import registers operators


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator: its name, its module, and whether this machine can run it at all."""

    name: str
    module: str
    machine: Callable[[Mapping[str, Any]], str | None]

    def load(self) -> ModuleType:
        return sys.modules.get(self.module) or importlib.import_module(self.module)


_MACHINE: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "triton": triton_unavailable,
    "native": native.unavailable,
    "cuda_grouped": grouped_unavailable,
    "reference": lambda tensors: None,
}


class Op:
    """One operator: schema, reference, stages and backends. Call it with a `backend` by name.

    schema    "(Tensor x, Tensor? gamma, float eps, str form) -> (Tensor y, Tensor inv_rms)": inputs first, then
              options; every result has a name. The C++ name is `goldsmith::<name with _>`.
    saved     results that only the backward needs; the caller never sees them
    residuals the tensors that the backward receives: names of inputs (including all that receive gradients) and of
              results. Default: all inputs and the saved results
    grads     inputs that can receive a gradient; empty for an operator that is not differentiable
    axes      the axes of every input and visible result, as patterns: {"x": "*batch n dim", "y": "*batch dim: sum"}; a
              table may hold more names, so that a family can share one (see axes.py). A saved result without a
              pattern is not returned for DTensors. Without axes, the operator takes no DTensors and defines `check` and
              `fake` itself
    expert_axis  (axis, ids): the axis that counts experts, first in every tensor that has it, and the input whose ids
              select them (-1 is skipped). Expert parallelism follows from it
    numbered  an input with a seed, behind which the tokens' numbers may follow. What the operator draws for a token
              depends on seed and number, by default the token's row; so ranks with some of the tokens draw the same
    stages    names that the reference exposes through `core.tracing.stage`
    internal  used by other operators of the family: verified like all, but no public function returns its results
    """

    _registry: ClassVar[dict[str, Op]] = {}
    _chosen: ClassVar[dict[Hashable, str]] = {}  # the backend of calls that passed the checks, by signature

    def __init__(
        self,
        name: str,
        *,
        schema: str,
        package: str,
        axes: Mapping[str, str] | None = None,
        expert_axis: tuple[str, str] | None = None,
        numbered: str | None = None,
        saved: tuple[str, ...] = (),
        residuals: tuple[str, ...] | None = None,
        backends: tuple[str, ...] = (),
        grads: tuple[str, ...] = (),
        stages: tuple[str, ...] = (),
        summary: str = "",
        internal: bool = False,
    ) -> None:
        if name in self._registry:
            raise ValueError(f"operator {name!r} is registered twice")
        self.name, self.package, self.summary, self.internal = name, package, summary, internal
        self.qualname = "goldsmith::" + name.replace(".", "_")
        parsed = torch._C.parse_schema(self.qualname + schema)
        self.schema = schema
        self.inputs = tuple(a.name for a in parsed.arguments if _is_tensor(a))
        self.optional = tuple(a.name for a in parsed.arguments if str(a.type) == "Optional[Tensor]")
        self.options = tuple(a.name for a in parsed.arguments if not _is_tensor(a))
        self._needed = frozenset(self.options)
        self._floats = tuple(a.name for a in parsed.arguments if str(a.type) == "float")
        self.results = tuple(r.name for r in parsed.returns)
        self.saved, self.grads, self.stages = saved, grads, stages
        self.outputs = tuple(r for r in self.results if r not in saved)
        self.residuals = (*self.inputs, *saved) if residuals is None else residuals
        self._check_declaration(parsed)
        self.expert_axis, self.numbered = expert_axis, numbered
        self.axes: dict[str, Axes] = (
            {} if axes is None else parse_axes(name, axes, (*self.inputs, *self.outputs), (*self.inputs, *self.results))
        )
        self.backends = {
            b: Backend(b, f"{package}.{'reference' if b == 'reference' else '_' + b}", _MACHINE[b])
            for b in (*backends, "reference")
        }
        self._custom_backward: Any = None
        self._custom = autograd.register(self)
        self._eager = autograd.eager(self)
        self._registry[name] = self

    def _check_declaration(self, parsed: Any) -> None:
        names = [a.name for a in parsed.arguments]
        if names != [*self.inputs, *self.options]:
            raise ValueError(f"{self.name}: the schema must list the inputs first and then the options, got {names}")
        if "" in self.results:
            raise ValueError(f"{self.name}: every result of the schema needs a name")
        for argument, entries, allowed in (
            ("saved", self.saved, self.results),
            ("residuals", self.residuals, self.inputs + self.results),
            ("grads", self.grads, tuple(r for r in self.residuals if r in self.inputs)),
        ):
            unknown = [g for g in entries if g not in allowed]
            if unknown:
                raise ValueError(f"{self.name}: {argument} names {unknown}, known are {list(allowed)}")

    # calling

    def __call__(self, *tensors: Tensor | None, backend: str = "auto", **options: object) -> Any:
        """The visible results from the requested backend: a tensor if there is one, otherwise a tuple."""
        results = self.all_results(*tensors, backend=backend, **options)
        visible = tuple(results[name] for name in self.outputs)
        return visible[0] if len(visible) == 1 else visible

    def all_results(self, *tensors: Tensor | None, backend: str = "auto", **options: Any) -> dict[str, Tensor]:
        """Every result by name, including saved ones; differentiable."""
        plain = autograd.plain(tensors)
        if not plain and sharding.has_dtensor(tensors):
            return sharding.run(self, tensors, backend, options)
        transformed = autograd.transformed()
        # in that case the fake checks the arguments, and the graph chooses the backend when it runs
        dispatch = torch.compiler.is_compiling()
        if not dispatch:
            known = signature(self, backend, tensors, options) if plain and not transformed else None
            chosen = self._chosen.get(known)
            if chosen is None:
                self.check(*tensors, **options)
                chosen = keep(self._chosen, known, self.choose(backend, tensors, options))
            backend = chosen
            for name in self._floats:  # an integer would compile a kernel again, and large ones do not fit
                options[name] = float(options[name])
            differentiable = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])
            # a meta tensor has no numbers: the fake supplies shape and dtype
            fake = tensors[0] is not None and tensors[0].is_meta
            dispatch = fake or not plain
            dispatch = dispatch or (differentiable and (autograd.watched() or not self.grads))
        if transformed:
            with autograd.undisturbed(tensors):
                results = self.reference.forward(*tensors, **options)
        elif dispatch:
            results = self._custom(*tensors, *(options[o] for o in self.options), backend)
            results = results if isinstance(results, (tuple, list)) else (results,)
        elif differentiable:
            results = self._eager.apply(backend, options, *tensors)
        else:
            results = self.run(backend, tensors, options)
        return dict(zip(self.results, results, strict=True))

    def run(self, backend: str, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> tuple[Tensor, ...]:
        """Every result, directly from a backend: no autograd, and no dispatcher, which costs 125 us per call."""
        module = self.backend(backend)

        def compute() -> tuple[Tensor, ...]:
            stored = autograd.as_stored(tensors)
            with autograd.undisturbed(stored):
                results = module.forward(*stored, **options)
            return autograd.fresh(results, stored)

        if not getattr(module, "LAUNCHES_ONLY", False):
            return compute()
        what = (module, tuple(options.items()), tuple(map(type, options.values())))
        return repeated(what, tensors, compute)

    def check(self, *tensors: Tensor | None, **options: object) -> None:
        if not options.keys() >= self._needed or len(tensors) != len(self.inputs):
            raise TypeError(f"{self.name}: takes inputs {list(self.inputs)} and options {list(self.options)}")
        checker = getattr(self._definition, "check", None)
        if checker is not None:
            checker(*tensors, **options)
        elif self.axes:
            self.check_axes(dict(zip(self.inputs, tensors, strict=True)))

    def check_axes(self, tensors: Mapping[str, Tensor | None], *, hint: str = "") -> None:
        """Raise TypeError, ShapeError or ValueError unless the inputs are dense, on one device, and fit their axes."""
        check_axes(self.name, self.axes, tensors, hint=hint)

    def fake(self, *tensors: Tensor | None, **options: object) -> tuple[Tensor, ...]:
        """Every result without its numbers: empty tensors of the right shapes, dtypes and devices."""
        defined = getattr(self._definition, "fake", None)
        if defined is None:
            return fake(self.axes, self.results, dict(zip(self.inputs, tensors, strict=True)), options)
        results = defined(*tensors, **options)
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    # backends

    def choose(self, backend: str, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> str:
        """The backend that will run: the named one, or for "auto" the first that can.

        Raises ValueError for an unknown name, and BackendUnavailable with the reason if the named one cannot run, or
        none can.
        """
        if backend == "auto":
            reasons = {}
            for name in self.backends:
                reasons[name] = self.why_not(name, *tensors, **options)
                if reasons[name] is None:
                    native.warn_if_not_built(reasons.get("native"))
                    return name
            raise UnsupportedCall(f"{self.name}: no backend: " + "; ".join(f"{n}: {why}" for n, why in reasons.items()))
        named = self._named(backend, tensors)
        reason = self._cannot_run(backend, named)
        if reason is not None:
            raise BackendUnavailable(f"{self.name}: {backend}: {reason}")
        reason = self._unsupported(backend, named, options)
        if reason is not None:
            raise UnsupportedCall(f"{self.name}: {backend}: {reason}")
        return backend

    def why_not(self, backend: str, *tensors: Tensor | None, **options: object) -> str | None:
        """Why `backend` cannot run this call, as a sentence; None if it can."""
        named = self._named(backend, tensors)
        reason = self._cannot_run(backend, named)
        return self._unsupported(backend, named, options) if reason is None else reason

    def _named(self, backend: str, tensors: tuple[Tensor | None, ...]) -> dict[str, Tensor | None]:
        if not isinstance(backend, str) or backend not in self.backends:
            raise ValueError(f"{self.name}: unknown backend {backend!r}; known: auto, {', '.join(self.backends)}")
        return dict(zip(self.inputs, tensors, strict=True))

    def _cannot_run(self, backend: str, named: dict[str, Tensor | None]) -> str | None:
        if backend != "reference" and autograd.transformed():
            return "torch.func transforms and forward-mode derivatives use the reference only"
        return self.backends[backend].machine(named)

    def _unsupported(self, backend: str, named: dict[str, Tensor | None], options: dict[str, Any]) -> str | None:
        unsupported = getattr(self.backend(backend), "unsupported", None)
        return unsupported(named, options) if unsupported is not None else None

    def backend(self, name: str) -> ModuleType:
        return self.backends[name].load()

    @property
    def reference(self) -> ModuleType:
        return self.backend("reference")

    @property
    def cases(self) -> list[Any]:
        return list(importlib.import_module(f"{self.package}.cases").CASES)

    @property
    def bench(self) -> list[Any]:
        return list(getattr(importlib.import_module(f"{self.package}.cases"), "BENCH", ()))

    @property
    def _definition(self) -> ModuleType:
        return sys.modules[f"{self.package}.op"]

    # the registry

    @classmethod
    def all(cls) -> dict[str, Op]:
        """Every operator by name, in order of registration."""
        for family in FAMILIES:
            importlib.import_module(f"goldsmith.{family}")
        return dict(cls._registry)

    @classmethod
    def get(cls, name: str) -> Op:
        ops = cls.all()
        if name not in ops:
            raise ValueError(f"no operator {name!r}; there are: {', '.join(sorted(ops))}")
        return ops[name]

    def __repr__(self) -> str:
        return f"Op({self.name!r}, backends={list(self.backends)})"


def _is_tensor(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")
