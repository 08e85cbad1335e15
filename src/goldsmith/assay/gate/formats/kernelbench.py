"""KernelBench's problems: a file with `Model`, `get_inputs` and `get_init_inputs`; candidates define `ModelNew`.

The weights of `Model` become inputs, which both models get by name, so a candidate that ignores a weight is found.
Two cases are drawn: the file's own inputs, and the same with normally distributed numbers in place of `torch.rand`,
and weights that no initialisation left at 0 or 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...declare.case import Case, Make
from ..bad_problem import BadProblem
from ..candidate_call import SEED, CandidateCall, TrainingModes
from ..problem import Problem
from ..weight_matching import Weight
from . import smaller_sizes

NEEDED = ("Model", "get_inputs", "get_init_inputs")


def recognised(names: Sequence[str]) -> bool:
    return all(name in names for name in NEEDED)


def read(
    module: ModuleType, name: str, content: str, *, dtypes: object = None, backward: Any = "present",
    sizes: str = "auto", elements: int = smaller_sizes.ELEMENTS,
) -> Problem:  # fmt: skip
    """The problem of an imported file.

    sizes: "declared" runs the file's own sizes; "auto" halves its constants until inputs and weights have at most
    `elements` elements, because the judge computes in float64, dozens of times.
    """
    settings, why = dict[str, object](), ""
    if sizes == "auto":
        module, settings = smaller_sizes.shrunk(
            module, content, elements, lambda m: _Reference(m, name, weighed=True).weigh()
        )
        why = (
            f"declared sizes are too large to judge here: run with {smaller_sizes.spelt(settings)}" if settings else ""
        )
    reference = _Reference(module, name)
    if backward == "present" and reference.cuts_gradients():
        backward = None
    # in 16 bits, the layers of a plain model round between each other
    options: dict[str, Any] = {"compute": "inputs"} if dtypes is None else {"compute": "inputs", "dtypes": dtypes}
    options["wants_kernel"] = getattr(module, "wants_kernel", False)
    options["finite"] = getattr(module, "finite", ())
    case_sizes = smaller_sizes.constants(module, content)
    cases = [
        Case(
            "declared", lambda make, **_: reference.draw(make, normal=False), case_sizes, why or "the file's own inputs"
        ),
        Case("normal", lambda make, **_: reference.draw(make, normal=True), case_sizes, "values outside [0, 1)"),
    ]
    if reference.constants:  # statistics, say, for which no model has gradients
        options["grads"] = reference.differentiable()
    return Problem(
        reference.golden, cases, name=name, backward=backward, construct=reference.entry.to_data(), **options
    )


class _Reference:
    """`Model` of a file, with its weights as arguments."""

    def __init__(self, module: ModuleType, name: str, *, weighed: bool = False) -> None:
        """weighed: it may be so large that no forward should run."""
        self.module, self.name, self.weighed = module, name, weighed
        init = _listed(module.get_init_inputs(), name, "get_init_inputs")
        self.init = tuple(init)
        self.model = self.built(SEED)
        self.parameters = _names_of(self.model, len(_inputs_of(module, name)))
        buffers = {n: b.detach() for n, b in self.model.named_buffers() if n not in self.weights}
        # in float64, because a golden makes nothing narrower
        self.rest = {n: b.double() if b.is_floating_point() else b for n, b in buffers.items()}

    def built(self, seed: int) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                model = self.module.Model(*self.init)
            except Exception as error:
                raise BadProblem(f"{self.name}: Model(...) raised {type(error).__name__}: {error}") from error
        if not isinstance(model, torch.nn.Module):
            raise BadProblem(f"{self.name}: Model is not a torch.nn.Module")
        return model

    @cached_property
    def weights(self) -> dict[str, str]:
        """Name in the model -> name in the case: every parameter, the buffers that two seeds draw differently, and
        constant ones.
        """
        other = dict(self.built(SEED + 1).named_buffers())
        drawn = [n for n, b in self.model.named_buffers() if n in other and not torch.equal(b, other[n])]
        taken = set(self.parameters)
        names = {}
        for state in [*dict(self.model.named_parameters()), *drawn, *self.constants]:
            name = state.replace(".", "_")
            while name in taken or not name.isidentifier():
                name = f"weight_{name}"
            taken.add(name)
            names[state] = name
        return names

    @cached_property
    def constants(self) -> tuple[str, ...]:
        """Buffers of zeros or ones that no call updates, such as the statistics of a norm that only evaluates."""
        model = self.built(SEED)
        before = {n: b.clone() for n, b in model.named_buffers() if _zeros_or_ones(b)}
        if self.weighed or not before:
            return ()
        inputs = _inputs_of(self.module, self.name)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                model(*inputs)
            except Exception:  # noqa: BLE001 - the golden's run reports it
                return ()
        return tuple(n for n, b in model.named_buffers() if n in before and torch.equal(b, before[n]))

    def differentiable(self) -> tuple[str, ...]:
        """The inputs that want gradients."""
        values = self._drawn(Make(torch.float32, "cpu", 0), normal=False)
        constant = {self.weights[n] for n in self.constants}
        tensors = {n: v for n, v in values.items() if isinstance(v, Tensor) and n not in constant}
        return tuple(n for n, v in tensors.items() if v.is_floating_point())

    @cached_property
    def entry(self) -> CandidateCall:
        state = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        wholes = [Weight.of(s, n, state[s]) for s, n in self.weights.items()]
        parts = [part for s, n in self.weights.items() for part in Weight.parts_of(s, n, state[s])]
        return CandidateCall(
            "module",
            ("ModelNew",),
            order=self.parameters,
            args=self.init,
            weights=(*wholes, *parts),
            evaluates=self.evaluates(),
        )

    def evaluates(self) -> bool:
        """Whether the model computes the same bits after `.eval()`: a norm of batches, say, does not."""
        values, modes = self._drawn(Make(torch.float32, "cpu", 0), normal=False), TrainingModes(self.model)
        results = []
        with torch.no_grad():
            for evaluating in (False, True):
                modes.set(evaluating=evaluating)
                results.append([t for t in _listed_results(self.golden(**values)) if isinstance(t, Tensor)])
        modes.set(evaluating=False)
        return len(results[0]) == len(results[1]) and all(map(torch.equal, *results))

    def golden(self, **values: Any) -> Any:
        """The model's forward, in the precision of its arguments."""
        inputs = [values[name] for name in self.parameters]
        weights = {state: values[name] for state, name in self.weights.items()}
        like = [v for v in (*inputs, *weights.values()) if isinstance(v, Tensor)]
        floating = next((t.dtype for t in like if t.is_floating_point()), None)
        device = like[0].device if like else torch.device("cpu")
        rest = {n: b.to(device, floating if b.is_floating_point() else None, copy=True) for n, b in self.rest.items()}
        return torch.func.functional_call(self.model, {**rest, **weights}, tuple(inputs))

    def cuts_gradients(self) -> bool:
        """Whether the forward detaches something, so that its gradient is no derivative."""
        values = self._drawn(Make(torch.float32, "cpu", 0), normal=False)
        with _Detached() as mode:
            self.golden(**values)
        return mode.seen

    def draw(self, make: Make, *, normal: bool) -> dict[str, object]:
        values = self._drawn(make, normal=normal)
        if normal and not self._finite(values):
            values = self._drawn(make, normal=False)  # a logarithm, say, which needs the file's own values
        return {
            n: v.to(make.dtype if v.is_floating_point() else v.dtype).to(make.device) if isinstance(v, Tensor) else v
            for n, v in values.items()
        }

    def _drawn(self, make: Make, *, normal: bool) -> dict[str, object]:
        seed = int(torch.randint(2**31, (), generator=make.generator))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if normal:
                with _NormalNumbers():
                    inputs = _inputs_of(self.module, self.name)
            else:
                inputs = _inputs_of(self.module, self.name)
        model = self.built(seed)
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        weights = {n: state[s].detach().clone() for s, n in self.weights.items()}
        if normal:
            weights = {n: _uneven(t, make.generator) for n, t in weights.items()}
        return {**dict(zip(self.parameters, inputs, strict=True)), **weights}

    def _finite(self, values: Mapping[str, object]) -> bool:
        with torch.no_grad():
            try:
                result = self.golden(**values)
            except (RuntimeError, ValueError, IndexError):
                return False
        results = _listed_results(result)
        return all(bool(t.isfinite().all()) for t in results if isinstance(t, Tensor) and t.is_floating_point())

    def weigh(self) -> tuple[int, Callable[[], object]]:
        """(elements of inputs and weights, a call of the forward)"""
        values = self._drawn(Make(torch.float32, "cpu", 0), normal=False)
        total = sum(v.numel() for v in values.values() if isinstance(v, Tensor))
        return total, lambda: self.golden(**values)


class _Detached(TorchFunctionMode):
    """Sees whether a tensor is cut from the graph."""

    CUTS = (torch.Tensor.detach, torch.Tensor.detach_, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or func in self.CUTS or not torch.is_grad_enabled()
        return func(*args, **(kwargs or {}))


class _NormalNumbers(TorchFunctionMode):
    """Inside, `torch.rand` and `torch.rand_like` draw normally distributed numbers."""

    REPLACED = {torch.rand: torch.randn, torch.rand_like: torch.randn_like}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.REPLACED.get(func, func)(*args, **(kwargs or {}))


def _uneven(t: Tensor, generator: torch.Generator) -> Tensor:
    """The weight, or, where all its elements are equal (a norm's 1, a bias's 0), a draw around that number."""
    if not t.is_floating_point() or t.numel() == 0 or bool((t != t.flatten()[0]).any()):
        return t
    uneven = t + 0.25 * torch.randn(t.shape, generator=generator, dtype=t.dtype)
    return uneven.abs() if bool(t.flatten()[0] > 0) else uneven  # a variance is positive


def _zeros_or_ones(t: Tensor) -> bool:
    """Whether it holds several numbers, all 0 or all 1."""
    first = float(t.flatten()[0]) if t.is_floating_point() and t.numel() > 1 else -1.0
    return first in (0.0, 1.0) and bool((t == first).all())


def _listed_results(result: Any) -> list[Any]:
    return list(
        result.values() if isinstance(result, Mapping) else result if isinstance(result, list | tuple) else [result]
    )


def _listed(value: object, name: str, function: str) -> list[object]:
    if not isinstance(value, list | tuple):
        raise BadProblem(f"{name}: {function} returns a {type(value).__name__}, expected a list")
    return list(value)


def _inputs_of(module: ModuleType, name: str) -> list[object]:
    try:
        inputs = module.get_inputs()
    except Exception as error:
        raise BadProblem(f"{name}: get_inputs raised {type(error).__name__}: {error}") from error
    return _listed(inputs, name, "get_inputs")


def _names_of(model: torch.nn.Module, count: int) -> tuple[str, ...]:
    """Names of the forward's arguments by position."""
    named = [
        p.name
        for p in inspect.signature(model.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return tuple(named[i] if i < len(named) else f"argument_{i}" for i in range(count))
