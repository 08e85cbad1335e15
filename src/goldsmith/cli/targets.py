"""Operators as assay targets, and names as operators or targets: the one place that knows both."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from ..assay.results import TargetError
from ..assay.target import Target
from ..core.op import Op

DTYPES = ("float32", "bfloat16", "float16")
COMPOSITES = ("mhc.connection", "router.memory", "router.peer")  # modules that only `goldsmith bench` knows


class UnknownName(ValueError):
    """A name that is no operator, family or target; the text says what exists."""


def op_target(op: Op, backend: str, *, device: str = "cpu", dtype: torch.dtype | None = None) -> Target:
    """`op` on `backend` as a target: held to its reference in float64, saved results, gradients and stages too.

    A backend's gradients are held to the reference's explicit backward, which names the stages that kernels name, too.
    The backend "reference" is held to float64 autograd through the reference's forward, so that one run of both
    certifies the explicit formula itself. `dtype` narrows the dtypes that inputs are drawn in; `device` is unused here.
    """
    module = importlib.import_module(f"{op.package}.cases")
    given = (*op.inputs, *op.options)

    def candidate(**arguments: object) -> dict[str, torch.Tensor]:
        tensors, options = _split(op, arguments)
        return op.all_results(*tensors, backend=backend, **options)

    def golden(**arguments: object) -> dict[str, torch.Tensor]:
        tensors, options = _split(op, arguments)
        return dict(zip(op.results, op.reference.forward(*tensors, **options), strict=True))

    backward = _differentiated(op) if backend == "reference" else _explicit(op)
    _takes(candidate, op.name, given, op.optional)
    _takes(golden, f"{op.name} reference", given, op.optional)
    sent = tuple(f"grad_{name}" for name in op.outputs)
    _takes(backward, f"{op.name} reference backward", (*given, *op.results, *sent), (*op.optional, *sent))
    return Target(
        candidate,
        golden,
        cases=op.cases,
        name=f"{op.name} on {backend}",
        outputs=op.results,
        saved=op.saved,
        backward="auto" if op.grads else None,
        golden_backward=backward if op.grads else None,
        grads=op.grads,
        stored=getattr(module, "STORED", {}).get(backend, {}),
        segments=getattr(module, "SEGMENTS", {}),
        decisions=getattr(module, "DECISIONS", {}),
        dtypes=(dtype,) if dtype is not None else op_dtypes(op),
    )


Gradients = dict[str, torch.Tensor | None]


def _explicit(op: Op) -> Callable[..., Gradients]:
    """The reference's own backward, by input name."""

    def backward(**arguments: object) -> Gradients:
        wanted = _differentiable(op, arguments)
        grads = {name: arguments.get(f"grad_{name}") for name in op.outputs}
        tensors = {name: arguments.get(name) for name in (*op.inputs, *op.results)}
        options = {name: arguments[name] for name in op.options}
        with torch.no_grad():
            gradients = op.reference.backward(grads, tensors, options, frozenset(wanted))
        return {name: gradients[name] for name in wanted}

    return backward


def _differentiated(op: Op) -> Callable[..., Gradients]:
    """Autograd through the reference's forward; the explicit backward runs beside it for the stages that it names."""
    explicit = _explicit(op)

    def backward(**arguments: object) -> Gradients:
        leaves = _differentiable(op, arguments)
        if all(leaf.dtype == torch.float64 for leaf in leaves.values()):  # stages have no ensemble of runs in float32
            explicit(**arguments)
        results = {name: _tensor(arguments, name) for name in op.outputs}
        sent = {name: _tensor(arguments, f"grad_{name}") for name in op.outputs}
        pairs = [(results[name], sent[name]) for name in op.outputs]
        arriving = [(y, grad) for y, grad in pairs if y is not None and y.requires_grad and grad is not None]
        gradients = torch.autograd.grad(
            [y for y, _ in arriving], list(leaves.values()), [grad for _, grad in arriving], allow_unused=True
        )
        return dict(zip(leaves, gradients, strict=True))

    return backward


def _differentiable(op: Op, arguments: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The inputs that can receive a gradient in this call: not what is absent, nor a packed base."""
    tensors = {name: _tensor(arguments, name) for name in op.grads}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.is_floating_point()}


def _tensor(arguments: Mapping[str, object], name: str) -> torch.Tensor | None:
    return cast("torch.Tensor | None", arguments.get(name))


def _takes(function: Callable[..., object], name: str, names: Sequence[str], optional: Sequence[str]) -> None:
    """Give `function` a readable signature: the assay binds by parameter name."""
    function.__name__ = name
    parameters = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None if n in optional else inspect.Parameter.empty)
        for n in names
    ]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


def op_dtypes(op: Op) -> tuple[torch.dtype, ...]:
    """The dtypes that a family's cases are drawn in: DTYPES of its cases module, else float32 and both 16-bit ones."""
    module = importlib.import_module(f"{op.package}.cases")
    named = getattr(module, "DTYPES", DTYPES)
    return tuple(getattr(torch, d) if isinstance(d, str) else d for d in named)


def _split(op: Op, arguments: Mapping[str, object]) -> tuple[tuple[torch.Tensor | None, ...], dict[str, object]]:
    return tuple(_tensor(arguments, name) for name in op.inputs), {name: arguments[name] for name in op.options}


@dataclass(frozen=True)
class ResolvedName:
    """What a name on the command line stands for: an operator, or the target at `index` of what `source` names."""

    name: str
    source: str
    op: Op | None = None
    target: Target | None = None
    index: int = 0


def find(names: Iterable[str]) -> list[ResolvedName]:
    """Operators and targets behind `names` (operators, families, `package.module:target`); all operators for none."""
    ops = dict(sorted(Op.all().items()))
    found: dict[str, ResolvedName] = {}
    names = list(names) or list(ops)
    for name in names:
        if ":" in name:
            for index, target in enumerate(load_targets(name)):
                taken = [n.name for n in found.values()]
                own = next(n for n in _names(str(target.name), name, index) if n not in taken)
                found.setdefault(f"{name}#{index}", ResolvedName(own, name, target=target, index=index))
            continue
        members = [o for o in ops if o == name or o.startswith(name + ".")]
        if not members:
            raise UnknownName(_unknown(name))
        for member in members:
            found.setdefault(member, ResolvedName(member, member, op=ops[member]))
    return list(found.values())


def _names(own: str, source: str, index: int) -> tuple[str, str, str]:
    """What a target may be called in tables: its own name, unless another has it."""
    return own, f"{own} ({source})", f"{own} ({source} #{index + 1})"


def operators() -> str:
    """What can be named, as an error lists it; parts of operators have names as well, and are left out."""
    ops = dict(sorted(Op.all().items()))
    families = sorted({o.partition(".")[0] for o in ops})
    return f"{', '.join(n for n, op in ops.items() if not op.internal)}; families: {', '.join(families)}"


def _unknown(name: str) -> str:
    if name in COMPOSITES:
        return (
            f"{name!r} is no operator but a module made of several, which `goldsmith bench {name}` proves before it "
            f"times it; operators are: {operators()}."
        )
    text = f"no operator {name!r}; there are: {operators()}."
    if name.endswith(".py") or "." in name:
        return text + " A target of your own is named package.module:target (a module's dotted name, not a file)."
    return text + " A target of your own is named package.module:target."


def load_targets(name: str) -> list[Target]:
    """The target, or list of targets, that `package.module:attribute` names; the current directory is importable."""
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    if not module_name or module_name.endswith(".py") or "/" in module_name or not attribute:
        raise UnknownName(f"{name!r}: a target is named package.module:target, a module's dotted name, not a file.")
    try:
        module = importlib.import_module(module_name)
    except TargetError as error:
        raise UnknownName(f"{name}: a target is declared wrongly{_declared(error)}: {error}") from error
    except Exception as error:  # a stranger's module may raise anything when imported; the user must see what
        raise UnknownName(_import_failed(name, module_name, error)) from error
    try:
        value: object = module
        for part in attribute.split("."):
            value = getattr(value, part)
    except AttributeError:
        known = sorted(k for k, v in vars(module).items() if isinstance(v, Target))
        there = f"targets there: {', '.join(known)}" if known else "no assay.Target is defined there"
        raise UnknownName(f"{module_name} has no {attribute!r}; {there}.") from None
    values = list(value) if isinstance(value, list | tuple) else [value]
    targets = [v for v in values if isinstance(v, Target)]
    if len(targets) < len(values) or not values:
        kind = next((type(v).__name__ for v in values if not isinstance(v, Target)), "an empty list")
        raise UnknownName(f"{name} is {kind}; it must be a goldsmith.assay.Target, or a list of them.")
    return [_named(target, name, number if len(targets) > 1 else 0) for number, target in enumerate(targets, 1)]


def _named(target: Target, source: str, number: int) -> Target:
    """A target that has no name, nor its candidate one that says anything, is called by what the user typed."""
    if not target.nameless:
        return target
    return replace(target, name=f"{source}#{number}" if number else source)


def _declared(error: TargetError) -> str:
    """Where the target is declared that an import stopped at: the module may declare several."""
    lines = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    own = [f"{file}, line {line}" for file, line in lines if not any(part in file for part in _NOT_THEIRS)]
    return f" ({own[-1]})" if own else ""


_NOT_THEIRS = ("<", "importlib", f"{os.sep}goldsmith{os.sep}assay{os.sep}", f"{os.sep}goldsmith{os.sep}cli{os.sep}")


def _import_failed(name: str, module_name: str, error: BaseException) -> str:
    root = module_name.partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and error.name in (root, module_name):
        return (
            f"{name}: there is no module {error.name!r}, neither in the current directory nor among the installed "
            "packages. Run the command from the folder that holds it, or install it."
        )
    where = ""
    trace = error.__traceback__
    if isinstance(error, SyntaxError):  # whose text says file and line
        trace = None
    while trace is not None:
        if "importlib" not in trace.tb_frame.f_code.co_filename:
            where = f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return f"{name}: importing {module_name} failed with {type(error).__name__}: {error}{where}"
