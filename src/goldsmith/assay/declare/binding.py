"""bind: calls a function with the values that its parameters name, by position up to the first one left out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.tracing import TargetError


@dataclass(frozen=True)
class Bound:
    """A callable and the names of its arguments: positional ones, then keywords."""

    call: Callable
    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()

    def __call__(self, supply: Mapping[str, object]) -> object:
        return self.call(*(supply[n] for n in self.positional), **{n: supply[n] for n in self.keywords})

    @property
    def names(self) -> tuple[str, ...]:
        return self.positional + self.keywords


def bind(label: str, fn: Callable, supply: Mapping[str, object] | tuple[str, ...]) -> Bound:
    """`fn` bound to the names of `supply`; raises TargetError for a parameter that `supply` lacks."""
    names = tuple(supply)
    call, parameters = signature_of(fn)
    if parameters is None:
        return Bound(call, names)
    positional: list[str] = []
    keywords: list[str] = []
    takes_rest = False
    for at, p in enumerate(parameters):
        if p.kind is p.VAR_KEYWORD:
            takes_rest = True
        elif p.name in names:
            # a wrapper such as torch.vmap may show a signature but accept only positions
            leading = at == len(positional) and p.kind is p.POSITIONAL_OR_KEYWORD
            (positional if leading or p.kind is p.POSITIONAL_ONLY else keywords).append(p.name)
        elif p.default is p.empty:
            raise TargetError(
                f"{label}: {_name(fn)} takes {p.name!r}, which is not supplied; "
                f"there are: {', '.join(names) or 'no names'}"
            )
        elif p.kind is p.POSITIONAL_ONLY:
            _no_gap(label, fn, p, parameters, names)
    if takes_rest:
        keywords += [n for n in names if n not in positional and n not in keywords]
    return Bound(call, tuple(positional), tuple(keywords))


def parameters(fn: Callable) -> tuple[str, ...]:
    """Parameter names of a function; empty if its signature cannot be read."""
    return tuple(p.name for p in signature_of(fn)[1] or ())


def _no_gap(label: str, fn: Callable, gap: inspect.Parameter, parameters: list, names: tuple[str, ...]) -> None:
    after = parameters[parameters.index(gap) + 1 :]
    positional = [p.name for p in after if p.kind is p.POSITIONAL_ONLY and p.name in names]
    if positional:
        raise TargetError(
            f"{label}: {_name(fn)} takes {positional[0]!r} by position after {gap.name!r}, which is not supplied"
        )


def signature_of(fn: Callable) -> tuple[Callable, list[inspect.Parameter] | None]:
    """(callable, its parameters); None for an unreadable signature or one with *args."""
    function = fn if isinstance(fn, type) else getattr(fn, "__self__", None)
    read: Callable = fn
    call = fn
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        call = function.apply
        read = function.forward
        new_style = function.setup_context is not torch.autograd.Function.setup_context
        skip = 0 if new_style else 1
    else:
        skip = 0
        if isinstance(fn, torch.nn.Module):
            read = fn.forward
    try:
        parameters = list(inspect.signature(read).parameters.values())[skip:]
    except (TypeError, ValueError):
        return call, None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return call, None
    if call is not read and not isinstance(fn, torch.nn.Module):  # Function.apply accepts only positions
        parameters = [p.replace(kind=p.POSITIONAL_ONLY) for p in parameters]
    return call, parameters


def _name(fn: Callable) -> str:
    name = getattr(fn, "__name__", None)
    if name in (None, "apply", "forward"):
        owner = getattr(fn, "__self__", fn)
        name = getattr(owner, "__name__", type(owner).__name__)
    return str(name)


def inputs_and_scalars(supply: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, object]]:
    """A case's dict split into inputs (tensors) and scalars (everything else)."""
    inputs = {n: v for n, v in supply.items() if isinstance(v, Tensor)}
    return inputs, {n: v for n, v in supply.items() if n not in inputs}
