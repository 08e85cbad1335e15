"""Operators as assay targets, and names as operators or targets: the one place that knows both."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..assay.declare.target import Target
from ..core.op import Op
from ..core.tracing import TargetError

DTYPES = ("float32", "bfloat16", "float16")


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

    def candidate(**named: Any) -> dict[str, torch.Tensor]:
        tensors, options = _split(op, named)
        return op.all_results(*tensors, backend=backend, **options)

    def golden(**named: Any) -> dict[str, torch.Tensor]:
        tensors, options = _split(op, named)
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

    def backward(**named: Any) -> Gradients:
        wanted = _wanted(op, named)
        grads = {name: named.get(f"grad_{name}") for name in op.outputs}
        tensors = {name: named.get(name) for name in (*op.inputs, *op.results)}
        options = {name: named[name] for name in op.options}
        with torch.no_grad():
            found = op.reference.backward(grads, tensors, options, frozenset(wanted))
        return {name: found[name] for name in wanted}

    return backward


def _differentiated(op: Op) -> Callable[..., Gradients]:
    """Autograd through the reference's forward; the explicit backward runs beside it for the stages that it names."""
    explicit = _explicit(op)

    def backward(**named: Any) -> Gradients:
        wanted = _wanted(op, named)
        if all(named[name].dtype == torch.float64 for name in wanted):  # stages have no ensemble of runs in float32
            explicit(**named)
        results = {name: named[name] for name in op.outputs if named[name].requires_grad}
        sent = {name: named.get(f"grad_{name}") for name in results}
        arriving = [name for name, grad in sent.items() if grad is not None]
        leaves = [named[name] for name in wanted]
        grads = [sent[name] for name in arriving]
        found = torch.autograd.grad([results[n] for n in arriving], leaves, grads, allow_unused=True)
        return dict(zip(wanted, found, strict=True))

    return backward


def _wanted(op: Op, named: dict[str, Any]) -> list[str]:
    """What can receive a gradient in this call: not what is absent, nor a packed base."""
    return [name for name in op.grads if named.get(name) is not None and named[name].is_floating_point()]


def _takes(function: Callable[..., Any], name: str, names: Sequence[str], optional: Sequence[str]) -> None:
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


def _split(op: Op, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(given.get(name) for name in op.inputs), {name: given[name] for name in op.options}


@dataclass(frozen=True)
class Named:
    """What a name on the command line stands for: an operator, or the target at `index` of what `source` names."""

    name: str
    source: str
    op: Op | None = None
    target: Target | None = None
    index: int = 0


def find(names: Iterable[str]) -> list[Named]:
    """Operators and targets behind `names` (operators, families, `package.module:target`); all operators for none."""
    ops = dict(sorted(Op.all().items()))
    found: dict[str, Named] = {}
    names = list(names) or list(ops)
    for name in names:
        if ":" in name:
            for index, target in enumerate(load_targets(name)):
                taken = [n.name for n in found.values()]
                own = next(n for n in _names(str(target.name), name, index) if n not in taken)
                found.setdefault(f"{name}#{index}", Named(own, name, target=target, index=index))
            continue
        members = [o for o in ops if o == name or o.startswith(name + ".")]
        if not members:
            raise UnknownName(_unknown(name))
        for member in members:
            found.setdefault(member, Named(member, member, op=ops[member]))
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
        value: Any = module
        for part in attribute.split("."):
            value = getattr(value, part)
    except AttributeError:
        targets = sorted(k for k, v in vars(module).items() if isinstance(v, Target))
        there = f"targets there: {', '.join(targets)}" if targets else "no assay.Target is defined there"
        raise UnknownName(f"{module_name} has no {attribute!r}; {there}.") from None
    values = list(value) if isinstance(value, list | tuple) else [value]
    wrong = [type(v).__name__ for v in values if not isinstance(v, Target)]
    if wrong or not values:
        kind = wrong[0] if wrong else "an empty list"
        raise UnknownName(f"{name} is {kind}; it must be a goldsmith.assay.Target, or a list of them.")
    return [_named(target, name, number if len(values) > 1 else 0) for number, target in enumerate(values, 1)]


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


_NOT_THEIRS = (
    "<",
    "importlib",
    f"{os.sep}goldsmith{os.sep}assay{os.sep}",
    f"{os.sep}goldsmith{os.sep}cli{os.sep}",
    f"{os.sep}goldsmith{os.sep}core{os.sep}tracing.py",
)


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
