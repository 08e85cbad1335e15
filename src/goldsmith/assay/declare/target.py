"""Target: a candidate, its golden, and the cases to run them on. Validated on construction; frozen.

It raises `TypeError` for an object of the wrong kind and `TargetError` (a `ValueError`) for a wrong name or value; the
message names the argument and lists the valid ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...core.tracing import TargetError, TargetTypeError
from .binding import Bound, bind, inputs_and_scalars, parameters
from .case import Case, as_cases
from .cpp_source import CppSource
from .decisions import Decision, Given, Sign, TopK
from .explained_arguments import explained_arguments
from .problem_steps import step
from .returned_values import own_names

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
DOTS = {"ieee": None, "tf32": 2.0**-11}
LAYOUTS = ("any", "contiguous")
FORMULAS = ("golden", "any")


MISSING = {
    "candidate": "give the kernel first: any callable, as in Target(kernel, golden, cases=...)",
    "golden": "give it second: a function in plain torch with the kernel's parameter names that says what the kernel "
    "should compute. The assay has no other way to know what is right",
    "cases": "give the inputs to try: a function decorated with @assay.case, or a dict of tensors, "
    "cases={'x': torch.randn(3, 4)}",
}


@explained_arguments(MISSING)
@dataclass(frozen=True, eq=False)
class Target:
    """A candidate to be checked against its golden.

    candidate       the kernel: any callable (function, `torch.autograd.Function`, `torch.nn.Module`), bound by name
    golden          plain torch code that defines the result; called with float64 copies of the same inputs
    cases           from `@assay.case`, a list of them, or a dict of tensors
    outputs         names in order; default ("y",), ("y0", "y1", ...) for a tuple, or the keys of a returned dict
    saved           outputs that only the backward needs: no gradient flows into them
    backward        "auto" (autograd), None (forward only), or a callable of inputs, scalars, outputs and grad_<output>
    golden_backward the same for the golden; default: float64 autograd through it
    grads           inputs whose gradients are judged; default: every floating-point input
    surrogate       those whose gradient is not a derivative of the golden (straight-through estimators)
    decisions       {result: assay.topk(...) | argmax | sign | given}
    stored          {stage: input}: stages that the candidate may round to that input's dtype, visibly or not
    segments        {tensor: {name: (lo, hi) on the last axis, or (axis, lo, hi)}}, or a function of the sizes
    dtypes          dtypes in which inputs are drawn, with one check each
    compute         declared precision of sums and intermediates; default float32 (float64 for float64 inputs);
                    "inputs": the 16-bit dtype of the inputs, if they all have one
    dot             "ieee" or "tf32"
    formula         "golden": results may err as the golden's formula may; "any": as any equally stable formula may, by
                    4 sqrt(n) u of the largest numbers beside an element
    layouts         "any", or "contiguous": the candidate must raise for any other layout of an input
    mutates         inputs that the candidate may write
    holds_nan       inputs that may hold NaN, which must then spread as in the golden; that of other inputs is a note
    finite          inputs that never hold NaN or Inf: the assay puts none into them
    reset           function to call before every run that must start fresh
    source          the C++ files that the candidate is built from, an `assay.CppSource`, in which a patch is looked for
    runner          runs the candidate elsewhere: called with the arguments and settings of each run (None: here)
    """

    candidate: Callable
    golden: Callable
    _: KW_ONLY
    cases: Any
    name: str | None = None
    outputs: tuple[str, ...] | None = None
    saved: tuple[str, ...] = ()
    backward: Callable | str | None = "auto"
    golden_backward: Callable | None = None
    grads: tuple[str, ...] | None = None
    surrogate: tuple[str, ...] = ()
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)
    segments: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    compute: torch.dtype | str | None = None
    dot: str = "ieee"
    formula: str = "golden"
    layouts: str = "any"
    mutates: tuple[str, ...] = ()
    holds_nan: tuple[str, ...] = ()
    finite: tuple[str, ...] = ()
    reset: Callable[[], object] | None = None
    source: CppSource | None = None
    runner: Callable[[Any, Any], Any] | None = field(default=None, repr=False)
    nameless: bool = field(default=False, init=False, repr=False)  # neither `name` nor the candidate provides a name
    _bound: dict = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        outside_of_transforms("Target")
        for argument in ("candidate", "golden"):
            _callable(argument, getattr(self, argument))
        for argument in ("golden_backward", "reset"):
            if getattr(self, argument) is not None:
                _callable(argument, getattr(self, argument))
        if self.backward is not None and self.backward != "auto":
            _callable("backward", self.backward, "'auto', None or a callable")
        if self.source is not None and not isinstance(self.source, CppSource):
            raise TargetTypeError(f"source: expected an assay.CppSource, got {type(self.source).__name__}")
        self._set("cases", as_cases(self.cases))
        self._set("nameless", self.name is None and _says_nothing(self.candidate))
        self._set("name", _own_name(self.candidate) if self.name is None else _string("name", self.name))
        self._set("outputs", None if self.outputs is None else _names("outputs", self.outputs))
        if self.outputs == ():
            raise TargetError("outputs: () is empty; leave it out, or name the results of the candidate")
        for argument in ("saved", "mutates", "surrogate", "holds_nan", "finite"):
            self._set(argument, _names(argument, getattr(self, argument)))
        self._set("grads", None if self.grads is None else _names("grads", self.grads))
        if self.outputs is not None:
            _known("saved", self.saved, self.outputs, "outputs")
        _choice("formula", self.formula, FORMULAS)
        _choice("layouts", self.layouts, LAYOUTS)
        _choice("dot", self.dot, tuple(DOTS))
        self._set("dtypes", _dtypes(self.dtypes))
        if self.compute not in (None, "inputs", *UNIT):
            raise TargetError(
                f"compute: {self.compute!r} is not a compute precision; use one of: {listed([*UNIT, 'inputs'])}"
            )
        self._check_decisions()
        self._check_segments()
        self._check_bindings()

    def _set(self, argument: str, value: object) -> None:
        object.__setattr__(self, argument, value)

    def _check_decisions(self) -> None:
        if not isinstance(self.stored, Mapping):
            raise TargetTypeError(f"stored: expected a dict from stages to inputs, got {type(self.stored).__name__}")
        if not isinstance(self.decisions, Mapping):
            raise TargetTypeError(f"decisions: expected a dict, got {type(self.decisions).__name__}")
        for name, decision in self.decisions.items():
            if not isinstance(decision, TopK | Sign | Given):
                raise TargetTypeError(
                    f"decisions: {name!r} must be assay.topk, argmax, sign or given, got {decision!r}"
                )

    def _check_segments(self) -> None:
        if not isinstance(self.segments, Mapping):
            raise TargetTypeError(f"segments: expected a dict by tensor name, got {type(self.segments).__name__}")
        for tensor, named in self.segments.items():
            if not callable(named):
                check_segments(tensor, named)

    def _check_bindings(self) -> None:
        """Checks on the smallest case that every parameter of the callables has a value."""
        supply = self.smallest().build(self.dtypes[0], "cpu", 0)
        inputs, scalars = inputs_and_scalars(supply)
        bind("candidate", self.candidate, supply)
        bind("golden", self.golden, supply)
        floating = [n for n, t in inputs.items() if t.is_floating_point()]
        wide = [n for n in floating if inputs[n].dtype.itemsize > 1]  # see wanted_grads
        _known("grads", self.grads or (), wide, "floating-point inputs")
        _known("mutates", self.mutates, inputs, "inputs")
        _known("holds_nan", self.holds_nan, floating, "floating-point inputs")
        _known("finite", self.finite, [n for n in floating if n not in self.holds_nan], "inputs without holds_nan")
        _known("surrogate", self.surrogate, floating if self.grads is None else self.grads, "inputs with gradients")
        _known("stored", tuple(self.stored.values()), floating, "floating-point inputs")
        if self.outputs is not None:
            own_names(self.outputs, supply, self.saved, "outputs:", self.backward is not None)
            names = (*supply, *self.outputs, *(f"grad_{o}" for o in self.outputs if o not in self.saved))
            for argument in ("backward", "golden_backward"):
                if callable(getattr(self, argument)):
                    bind(argument, getattr(self, argument), names)
        for name, decision in self.decisions.items():
            for what in (getattr(decision, "k", None), getattr(decision, "rate", None)):
                if isinstance(what, str):
                    _known(f"decisions[{name!r}]", (what,), scalars, "scalars")

    def check_names(self, supply: Mapping[str, object], returned: Sequence[str], golden: Sequence[str]) -> None:
        """Checks names that only a run reveals: those `returned` by the candidate, and all names of the `golden`."""
        _known("saved", self.saved, returned, "outputs")
        if not any(stage in golden for stage in self.stored):  # a case may omit some of them
            stages = [n for n in golden if n not in returned and not n.endswith(".grad")]
            _known("stored", tuple(self.stored), stages, "golden's stages")
        results = dict.fromkeys(n.removeprefix("saved.") for n in (*returned, *golden))
        inputs = (*supply, *parameters(self.golden))  # including those that are None in this case
        grads = {f"{n}.grad" for n in inputs}
        unknown = [n for n in self.segments if n.removeprefix("saved.") not in (*results, *grads)]
        if self.backward is not None and self.golden_backward is not None and not grads & set(golden):
            unknown = []  # no gradient was sent, so the golden's backward, which may have stages, did not run
        _known("segments", unknown, results, "results and stages")
        sent = [f"grad_{n}" for n in returned if n not in self.saved]
        for argument, more in (("backward", ()), ("golden_backward", golden)):
            if callable(getattr(self, argument)):
                bind(argument, getattr(self, argument), tuple(dict.fromkeys([*supply, *returned, *more, *sent])))

    def bound(self, argument: str, supply: Mapping[str, object]) -> Bound:
        """The callable of that argument, bound to the names of `supply` (cached, because binding takes 0.2 ms)."""
        key = (argument, tuple(supply))
        if key not in self._bound:
            bound = bind(argument, getattr(self, argument), supply)
            if argument in ("golden", "golden_backward"):  # whoever waits for the judge waits for these
                bound = replace(bound, call=_as_step(bound.call, f"a call of its {argument}"))
            self._bound[key] = bound
        return self._bound[key]

    # queries of a check

    def smallest(self) -> Case:
        """The case with the smallest product of sizes, for validation and never for verdicts."""

        def elements(case: Case) -> float:
            product = 1.0
            for size in case.sizes.values():
                product *= max(size, 1) if isinstance(size, int) else 1
            return product

        return min(self.cases, key=elements)

    def case(self, wanted: Case | str) -> Case:
        """The case of that name; TargetError lists the known names."""
        if isinstance(wanted, Case):
            return wanted
        for case in self.cases:
            if case.name == wanted:
                return case
        raise TargetError(f"case: {self.name} has no case {wanted!r}; there are: {listed(c.name for c in self.cases)}")

    def compute_dtype(self, inputs: Mapping[str, Tensor]) -> torch.dtype:
        """Precision of sums and intermediates: `compute`, or float64 if all inputs are float64, else float32."""
        if isinstance(self.compute, torch.dtype):
            return self.compute
        floating = {t.dtype for t in inputs.values() if t.is_floating_point()}
        own = (torch.float64, *((torch.float16, torch.bfloat16) if self.compute == "inputs" else ()))
        return next((d for d in own if floating == {d}), torch.float32)

    def wanted_grads(self, inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Inputs that get a gradient."""
        return wanted_grads(self.grads, inputs)

    def segments_of(
        self, tensor: str, sizes: Mapping[str, object], shape: Sequence[int]
    ) -> dict[str, tuple[int, int, int]]:
        """Declared segments of a tensor of that shape, name -> (axis, lo, hi); the default axis is -1, the last."""
        named = self.segments.get(tensor, self.segments.get(tensor.removeprefix("saved."), {}))
        if callable(named):
            supply = {**sizes, "sizes": dict(sizes)}
            bound = bind(f"segments[{tensor!r}]", named, supply)
            try:
                named = bound(supply)
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise TargetError(f"segments[{tensor!r}]: the function raised {what}") from error
            check_segments(tensor, named)
        spans = {name: tuple(r) if len(r) == 3 else (-1, *r) for name, r in named.items()}
        for name, (axis, lo, hi) in spans.items():
            if not -len(shape) <= axis < len(shape) or hi > shape[axis]:
                span = f"{name!r} is [{lo}, {hi}) of axis {axis}"
                raise TargetError(f"segments[{tensor!r}]: {span}, but {tensor} has shape {list(shape)}")
        return spans

    def __repr__(self) -> str:
        return f"Target({self.name}, {len(self.cases)} cases)"


def wanted_grads(declared: tuple[str, ...] | None, inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Inputs that get a gradient; not those in 8 bits, on which torch computes nothing."""
    floating = tuple(n for n, t in inputs.items() if t.is_floating_point() and t.dtype.itemsize > 1)
    return floating if declared is None else tuple(g for g in declared if g in floating)


def outside_of_transforms(caller: str) -> None:
    """Raises inside vmap or grad, where tensors have no values to draw, place or compare."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise TargetError(
            f"{caller}: called inside a torch.func transform (vmap, grad, ...), where tensors have no values; "
            "call it outside, on a candidate that applies the transform itself"
        )


def check_segments(tensor: str, named: object) -> None:
    if not isinstance(named, Mapping):
        raise TargetTypeError(
            f"segments[{tensor!r}]: expected a dict or a function of the sizes, got {type(named).__name__}"
        )
    for name, span in named.items():
        numbers = isinstance(span, tuple) and len(span) in (2, 3) and all(isinstance(v, int) for v in span)
        if not numbers or not 0 <= span[-2] <= span[-1]:
            raise TargetError(
                f"segments[{tensor!r}]: {name!r} must be (lo, hi) or (axis, lo, hi) with 0 <= lo <= hi, got {span!r}"
            )


def _callable(argument: str, value: object, wanted: str = "a callable") -> None:
    if not callable(value):
        raise TargetTypeError(f"{argument}: expected {wanted}, got {type(value).__name__} {value!r}"[:200])


def _string(argument: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TargetTypeError(f"{argument}: expected a name, got {value!r}")
    return value


def _names(argument: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise TargetTypeError(f"{argument}: expected a tuple of names, got {value!r}")
    duplicates = [n for n in value if list(value).count(n) > 1]
    if duplicates:
        raise TargetError(f"{argument}: {duplicates[0]!r} occurs more than once in {list(value)}")
    return tuple(value)


def _known(argument: str, names: Iterable[object], known: Collection[object], what: str) -> None:
    unknown = [n for n in names if n not in known]
    if unknown:
        raise TargetError(f"{argument}: {unknown[0]!r} is not among the {what}; there are: {listed(known)}")


def _choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise TargetError(f"{argument}: {value!r} is not valid; there are: {listed(choices)}")


def _dtypes(value: object) -> tuple[torch.dtype, ...]:
    dtypes = (value,) if isinstance(value, torch.dtype) else value
    if not isinstance(dtypes, list | tuple) or not dtypes or not all(isinstance(d, torch.dtype) for d in dtypes):
        raise TargetTypeError(f"dtypes: expected a tuple of torch dtypes, got {value!r}")
    twice = [d for d in dtypes if list(dtypes).count(d) > 1]
    if twice:
        raise TargetError(f"dtypes: {twice[0]} occurs more than once")
    unknown = [d for d in dtypes if d not in UNIT]
    if unknown:
        raise TargetError(f"dtypes: {unknown[0]} cannot be judged; use one of: {listed(UNIT)}")
    return tuple(dtypes)


def listed(names: Iterable[object]) -> str:
    shown = [str(n) for n in names]
    return ", ".join(shown[:20]) + (f", ... ({len(shown)} in all)" if len(shown) > 20 else "") or "none"


def _says_nothing(candidate: object) -> bool:
    return isinstance(candidate, functools.partial) or getattr(candidate, "__name__", "") == "<lambda>"


def _own_name(candidate: object) -> str:
    """Name of a candidate; module:qualname for a lambda or a partial."""
    if _says_nothing(candidate):
        while isinstance(candidate, functools.partial):
            candidate = candidate.func
        name = getattr(candidate, "__qualname__", type(candidate).__qualname__)
        return f"{getattr(candidate, '__module__', type(candidate).__module__)}:{name}"
    owner = getattr(candidate, "__self__", candidate)
    if getattr(candidate, "__name__", "") == "apply" and isinstance(owner, type):
        return owner.__name__
    return getattr(candidate, "__name__", None) or type(candidate).__name__


def _as_step(call: Callable, words: str) -> Callable:
    def called(*args: object, **kwargs: object) -> object:
        with step(words):
            try:
                return call(*args, **kwargs)
            except SystemExit as error:  # it would end the judge, not only the golden
                raise RuntimeError(f"it raised SystemExit({error})") from error

    return called
