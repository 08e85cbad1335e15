"""Operators as assay targets, and the operators or targets that names on the command line stand for."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from ..assay.declare.target import Target
from ..core.op import Op
from .user_targets import FORMS, UnknownName, all_targets, is_file, is_module, load_targets

DTYPES = ("float32", "bfloat16", "float16")


def op_target(op: Op, backend: str, *, device: str = "cpu", dtype: torch.dtype | None = None) -> Target:
    """`op` on `backend` as a target, whose golden is the operator's reference in float64.

    Saved results, gradients and stages are compared as well. Gradients are compared with the reference's explicit
    backward, which names the same stages as the kernels. The backend "reference" is compared with float64 autograd
    through the reference's forward instead, and so certifies the explicit backward itself. `dtype` narrows the dtypes
    in which inputs are drawn; `device` is unused.
    """
    module = importlib.import_module(f"{op.package}.cases")
    arguments = (*op.inputs, *op.options)

    def candidate(**values: object) -> dict[str, torch.Tensor]:
        tensors, options = _split(op, values)
        return op.all_results(*tensors, backend=backend, **options)

    def golden(**values: object) -> dict[str, torch.Tensor]:
        tensors, options = _split(op, values)
        return dict(zip(op.results, op.reference.forward(*tensors, **options), strict=True))

    backward = _autograd_backward(op) if backend == "reference" else _explicit_backward(op)
    _set_signature(candidate, op.name, arguments, op.optional)
    _set_signature(golden, f"{op.name} reference", arguments, op.optional)
    cotangents = tuple(f"grad_{name}" for name in op.outputs)
    _set_signature(
        backward, f"{op.name} reference backward", (*arguments, *op.results, *cotangents), (*op.optional, *cotangents)
    )
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


def _explicit_backward(op: Op) -> Callable[..., Gradients]:
    """The reference's explicit backward; returns gradients by input name."""

    def backward(**arguments: object) -> Gradients:
        wanted = _differentiable(op, arguments)
        grads = {name: arguments.get(f"grad_{name}") for name in op.outputs}
        tensors = {name: arguments.get(name) for name in (*op.inputs, *op.results)}
        options = {name: arguments[name] for name in op.options}
        with torch.no_grad():
            gradients = op.reference.backward(grads, tensors, options, frozenset(wanted))
        return {name: gradients[name] for name in wanted}

    return backward


def _autograd_backward(op: Op) -> Callable[..., Gradients]:
    """Autograd through the reference's forward; the explicit backward also runs, because it names the stages."""
    explicit = _explicit_backward(op)

    def backward(**arguments: object) -> Gradients:
        leaves = _differentiable(op, arguments)
        if all(leaf.dtype == torch.float64 for leaf in leaves.values()):  # ensembles of float32 runs hold no stages
            explicit(**arguments)
        results = {name: _tensor(arguments, name) for name in op.outputs}
        cotangents = {name: _tensor(arguments, f"grad_{name}") for name in op.outputs}
        pairs = [(results[name], cotangents[name]) for name in op.outputs]
        arriving = [(y, grad) for y, grad in pairs if y is not None and y.requires_grad and grad is not None]
        gradients = torch.autograd.grad(
            [y for y, _ in arriving], list(leaves.values()), [grad for _, grad in arriving], allow_unused=True
        )
        return dict(zip(leaves, gradients, strict=True))

    return backward


def _differentiable(op: Op, arguments: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The inputs that can receive a gradient in this call: those present and of a floating-point dtype."""
    tensors = {name: _tensor(arguments, name) for name in op.grads}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.is_floating_point()}


def _tensor(arguments: Mapping[str, object], name: str) -> torch.Tensor | None:
    return cast("torch.Tensor | None", arguments.get(name))


def _set_signature(function: Callable[..., object], name: str, names: Sequence[str], optional: Sequence[str]) -> None:
    """Give `function` a name and keyword parameters, because the assay binds arguments by name."""
    function.__name__ = name
    parameters = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None if n in optional else inspect.Parameter.empty)
        for n in names
    ]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


def op_dtypes(op: Op) -> tuple[torch.dtype, ...]:
    """The dtypes in which an operator's cases are drawn: DTYPES of its cases module, by default DTYPES of this one."""
    module = importlib.import_module(f"{op.package}.cases")
    dtypes = getattr(module, "DTYPES", DTYPES)
    return tuple(getattr(torch, d) if isinstance(d, str) else d for d in dtypes)


def _split(op: Op, arguments: Mapping[str, object]) -> tuple[tuple[torch.Tensor | None, ...], dict[str, object]]:
    return tuple(_tensor(arguments, name) for name in op.inputs), {name: arguments[name] for name in op.options}


@dataclass(frozen=True)
class ResolvedName:
    """A name on the command line with what it stands for: an operator, or target number `index` of `source`."""

    name: str
    source: str
    op: Op | None = None
    target: Target | None = None
    index: int = 0


def find(names: Iterable[str]) -> list[ResolvedName]:
    """What `names` stand for; without names, all operators.

    A name is an operator, a family, `module:target` or `file.py:target`, or a module or file, for all of its targets.
    """
    ops = dict(sorted(Op.all().items()))
    resolved: dict[str, ResolvedName] = {}
    names = list(names) or list(ops)
    for name in names:
        members = [o for o in ops if o == name or o.startswith(name + ".")]
        if ":" in name or (not members and (is_file(name) or is_module(name))):
            for source in [name] if ":" in name else all_targets(name):
                for index, target in enumerate(load_targets(source)):
                    own = ResolvedName(str(target.name), source, target=target, index=index)
                    resolved.setdefault(f"{source}#{index}", own)
            continue
        if not members and Path(name).is_dir():
            raise UnknownName(f"{name} is a folder; name one of its files, as {name}/FILE.py.")
        if not members:
            raise UnknownName(_unknown(name))
        for member in members:
            resolved.setdefault(member, ResolvedName(member, member, op=ops[member]))
    return _distinct(list(resolved.values()))


def _distinct(resolved: list[ResolvedName]) -> list[ResolvedName]:
    """Targets of one name get their source in parentheses, and those of one source their number as well."""
    for name in (lambda n: f"{n.name} ({n.source})", lambda n: f"{n.name[:-1]} #{n.index + 1})"):
        times = Counter(n.name for n in resolved)
        resolved = [replace(n, name=name(n)) if times[n.name] > 1 and n.target else n for n in resolved]
    return resolved


def operators() -> str:
    """The operators and families, as errors list them; internal operators are left out."""
    ops = dict(sorted(Op.all().items()))
    families = sorted({o.partition(".")[0] for o in ops})
    return f"{', '.join(n for n, op in ops.items() if not op.internal)}; families: {', '.join(families)}"


def _unknown(name: str) -> str:
    return f"unknown operator {name!r}; known: {operators()}. Name a target of your own as {FORMS}."
