"""CandidateCall: which function or class of a source is the candidate, and how to call it. `load` imports the source.

function     a function (or any callable) that takes its arguments by name, like a Target's candidate
module       a class of modules, such as KernelBench's `ModelNew`: built once, called with the weights of the case
destination  a function that fills its last arguments: FlashInfer-Bench's destination passing style
positional   a function that takes the inputs by position, such as FlashInfer-Bench's other solutions
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..declare.binding import signature_of
from ..declare.source_module import source_module
from .compiled import sources as compiled_sources
from .isolation.candidate_side import Parts
from .isolation.loading import Refusal
from .source_files import write_below
from .weight_matching import Weight, matched

KINDS = ("", "function", "module", "destination", "positional")
MODULE = "candidate_source"  # of a source, whatever the candidate's name: one named scipy must not stand for scipy
SEED = 0  # of both models' constructors, so that equal code draws equal weights


@dataclass(frozen=True)
class Output:
    """A tensor that a candidate in destination passing style fills: its axes are numbers or names of axes."""

    name: str
    axes: tuple[str | int, ...]
    dtype: str


@dataclass(frozen=True)
class CandidateCall:
    """Plain data: it travels to the candidate's process, which has neither the golden nor the problem's file.

    kind      one of KINDS; "" means a module if the name is that of a class of modules, otherwise a function
    names     names to look for; the first that the source defines is the candidate
    order     names of the case in the order of the callable's arguments (all kinds but "function")
    args      arguments of a module's constructor; kwargs: by name
    state     weights of a module that are the same in every case: name -> tensor
    weights   weights of a module that are inputs of the case
    outputs   tensors to allocate for destination passing style
    axes      axis -> (input, dimension): where its size can be read
    evaluates  a module computes the same after `.eval()`, which calls without gradients then use
    """

    kind: str = ""
    names: tuple[str, ...] = ("candidate", "ModelNew")
    order: tuple[str, ...] = ()
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)
    weights: tuple[Weight, ...] = ()
    outputs: tuple[Output, ...] = ()
    axes: tuple[tuple[str, str, int], ...] = ()
    evaluates: bool = False

    def to_data(self) -> dict[str, object]:
        """As dicts and tuples; `Problem.construct` holds it."""
        return {
            **{f.name: getattr(self, f.name) for f in fields(self)},
            "weights": tuple(astuple(w) for w in self.weights),
            "outputs": tuple(astuple(o) for o in self.outputs),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> CandidateCall:
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        weights = tuple(Weight(*w) for w in data.get("weights", ()))
        return cls(**{**known, "weights": weights, "outputs": tuple(Output(*o) for o in data.get("outputs", ()))})


def wanted_names(entry: str, construct: Mapping[str, Any]) -> tuple[str, ...]:
    """The names to look for in a source: the candidate's own, or those of the problem."""
    return (entry,) if entry else tuple(construct.get("names", CandidateCall.names))


def load(
    source: str, entry: str = "", language: str = "python", call: str = "",
    files: Mapping[str, str] | None = None, construct: Mapping[str, object] | None = None, library: bytes = b"",
) -> Parts:  # fmt: skip
    """The candidate's callables. Its files are written to the current folder, which only this candidate has.

    library: of a source in a compiled language. Raises `Refusal` where the source does not parse, needs a missing
    package, or lacks the function, and whatever the source itself raises.
    """
    declared = CandidateCall.from_data({**(construct or {}), **({"kind": call} if call else {})})
    names, files = wanted_names(entry, construct or {}), files or {}
    folder = Path.cwd()
    if language in compiled_sources.LANGUAGES:
        function = compiled_sources.function(library, source, names, folder)
        by_position = declared.kind in ("destination", "positional")
        return Parts(_called(function, declared if by_position else replace(declared, kind="positional")))
    for path, text in files.items():
        write_below(folder, path, text)
    if files and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # a solution of several files imports its other files
    module = _imported(source, folder)
    defined_name = next((n for n in names if hasattr(module, n)), None)
    if defined_name is None:
        defined = [
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
        ]
        raise Refusal(
            "no_entry",
            f"it defines no {' and no '.join(names)}; it defines: {', '.join(defined[:10]) or 'no function'}",
        )
    value = getattr(module, defined_name)
    if not callable(value):
        raise Refusal("no_entry", f"{defined_name} is of type {type(value).__name__}, not a function")
    _check_style(value, defined_name, declared)
    backward, reset = getattr(module, "backward", None), getattr(module, "reset", None)
    function = _called(value, declared)
    remarks = tuple(function.remarks) if isinstance(function, Module) else ()
    return Parts(
        function,
        backward if callable(backward) else None,
        reset if callable(reset) else None,
        remarks=remarks,
    )


def _check_style(function: Callable[..., object], name: str, entry: CandidateCall) -> None:
    """`Refusal` where a function of FlashInfer-Bench has the parameters of the other style of passing results."""
    parameters = signature_of(function)[1]
    if entry.kind not in ("positional", "destination") or not entry.outputs or parameters is None:
        return
    inputs, outputs = len(entry.order), len(entry.outputs)
    fills, other = entry.kind == "destination", inputs if entry.kind == "destination" else inputs + outputs
    if _takes(parameters, other) and not _takes(parameters, 2 * inputs + outputs - other):
        raise Refusal(
            "passing_style",
            f"{name} takes {', '.join(p.name for p in parameters)}: "
            + (
                "it returns its results, and destination_passing_style, which is true where the spec leaves it out, "
                "passes tensors for them; set it to false"
                if fills
                else "it fills its results, and destination_passing_style is false; set it to true"
            ),
        )


def _takes(parameters: Sequence[Parameter], count: int) -> bool:
    """Whether this many arguments can be passed by position."""
    try:
        Signature(parameters).bind(*range(count))
    except TypeError:
        return False
    return True


def _called(value: Callable[..., object], entry: CandidateCall) -> Callable[..., Any]:
    modules = isinstance(value, type) and issubclass(value, torch.nn.Module)
    if entry.kind == "module" or (not entry.kind and modules):
        return Module(value, entry)
    if entry.kind == "destination":
        return Destination(value, entry)
    if entry.kind == "positional":
        return Positional(value, entry.order)
    return value


def _imported(source: str, folder: Path) -> ModuleType:
    """The source as a module in a file, because Triton and tracebacks read the file again."""
    file = write_below(folder, f"{MODULE}.py", source)
    try:
        compile(source, str(file), "exec")
    except (SyntaxError, ValueError) as error:  # ValueError: a zero byte
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        reason = f"{type(error).__name__}: {getattr(error, 'msg', None) or error}"
        raise Refusal("does_not_parse", f"it does not parse: {line}{reason}") from None
    except (RecursionError, MemoryError):
        raise Refusal("does_not_parse", "its expressions are nested too deeply for Python's parser") from None
    module, run = source_module(MODULE, file)
    sys.modules[MODULE] = module
    try:
        run()
    except ModuleNotFoundError as error:
        raise Refusal("missing_package", f"it needs a package that is not installed here: {error}") from error
    return module


class Positional:
    """Calls a function with the case's values by position."""

    def __init__(self, function: Callable[..., object], order: Sequence[str]) -> None:
        self.function, self.order = function, tuple(order)

    def __call__(self, **values: object) -> object:
        return self.function(*(values[name] for name in (self.order or values)))


class Destination:
    """Allocates the outputs, passes them after the inputs, and returns them."""

    def __init__(self, function: Callable[..., object], entry: CandidateCall) -> None:
        self.function, self.entry = function, entry

    def __call__(self, **values: Any) -> Any:
        inputs = [values[name] for name in self.entry.order]
        tensors = [v for v in inputs if isinstance(v, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        sizes = {axis: values[name].shape[dim] for axis, name, dim in self.entry.axes if name in values}
        filled = [
            torch.empty([a if isinstance(a, int) else sizes[a] for a in o.axes], dtype=DTYPES[o.dtype], device=device)
            for o in self.entry.outputs
        ]
        self.function(*inputs, *filled)
        return filled[0] if len(filled) == 1 else tuple(filled)


class Module:
    """Calls an `nn.Module` with the weights of the case in place of its own.

    remarks: sentences about weights that have no place in it, and about its parameters that are no weights.
    """

    def __init__(self, build: Callable[..., Any], entry: CandidateCall) -> None:
        self.order, self.evaluates = entry.order, entry.evaluates
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            torch.manual_seed(SEED)
            self.module = build(*entry.args, **entry.kwargs)
        if not isinstance(self.module, torch.nn.Module):
            kind = type(self.module).__name__
            raise Refusal("no_entry", f"it makes a {kind}, expected a torch.nn.Module")
        self.modes = TrainingModes(self.module)
        own = self.module.state_dict()
        self.module.load_state_dict({n: t for n, t in entry.state.items() if n in own}, strict=False)
        self.names = {w.name for w in entry.weights}
        self.repackings, self.remarks = matched(self.module, entry.weights)

    def __call__(self, **values: Any) -> Any:
        inputs = (
            [values[name] for name in self.order]
            if self.order
            else [v for n, v in values.items() if n not in self.names]
        )
        weights = {own: repacking.of(values) for own, repacking in self.repackings.items()}
        like = [v for v in (*inputs, *weights.values()) if isinstance(v, Tensor)]
        floating = next((t.dtype for t in like if t.is_floating_point()), None)
        state = placed_state(self.module, like[0].device if like else torch.device("cpu"), floating)
        self.modes.set(evaluating=self.evaluates and not torch.is_grad_enabled())
        return torch.func.functional_call(self.module, {**state, **weights}, tuple(inputs))


class TrainingModes:
    """Whether a module and each of its submodules trains, as the constructor left them: a frozen norm stays frozen."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.training = module, [(m, m.training) for m in module.modules()]

    def set(self, *, evaluating: bool) -> None:
        """All of them evaluate, or all are as they were."""
        if all(m.training == (training and not evaluating) for m, training in self.training):
            return
        self.module.train(self.training[0][1] and not evaluating)  # its own `train` may do more than set modes
        for m, training in self.training:
            m.training = training and not evaluating


def placed_state(module: torch.nn.Module, device: torch.device, floating: torch.dtype | None) -> dict[str, Tensor]:
    """Fresh copies of a module's parameters and buffers, so that a call leaves no trace in them."""
    with torch.no_grad():
        return {
            name: t.detach().to(device, floating if t.is_floating_point() else None, copy=True)
            for name, t in (*module.named_parameters(), *module.named_buffers())
        }


DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
