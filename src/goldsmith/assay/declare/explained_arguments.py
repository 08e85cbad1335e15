"""Decorators that explain unknown and missing arguments: of a declaration, and of a function that checks one."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from ...core.tracing import TargetError

P = ParamSpec("P")
T = TypeVar("T")
TOLERANCES = ("tolerance", "tolerances", "tol", "atol", "rtol", "abs_tol", "rel_tol", "threshold")
NO_TOLERANCE = (
    "there is no tolerance to choose, because the assay computes a bound for every element from the golden and the "
    "dtypes; leave it out. A kernel that rounds more on purpose declares it with `stored`, `compute` or `dot`"
)


def explained_arguments(missing: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Class decorator: the constructor raises TargetError for an unknown or a missing argument.

    missing: what each required argument is and how to give it
    """

    def decorate(cls: type[T]) -> type[T]:
        construct: Callable[..., None] = vars(cls)["__init__"]
        parameters = list(inspect.signature(construct).parameters.values())[1:]

        @functools.wraps(construct)
        def __init__(self: T, *args: object, **named: object) -> None:
            _check(cls.__name__, parameters, missing, args, named)
            construct(self, *args, **named)

        setattr(cls, "__init__", __init__)  # noqa: B010  mypy refuses the plain assignment
        return cls

    return decorate


def explained_options(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a function: an unknown argument raises TargetError, which says why there is no tolerance."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def wrapped(*args: P.args, **named: P.kwargs) -> T:
        _check_names(function.__name__, known, named)
        return function(*args, **named)

    return wrapped


def _check_names(name: str, known: list[str], named: Mapping[str, object]) -> None:
    for argument in named:
        if argument in TOLERANCES:
            raise TargetError(f"{argument}: {NO_TOLERANCE}")
        if argument not in known:
            near = difflib.get_close_matches(argument, known, 1)
            hint = f"did you mean {near[0]!r}? Its arguments are" if near else "its arguments are"
            raise TargetError(f"{argument}: {name} has no such argument; {hint}: {', '.join(known)}")


def _check(
    name: str,
    parameters: list[inspect.Parameter],
    missing: Mapping[str, str],
    args: tuple[object, ...],
    named: Mapping[str, object],
) -> None:
    known = [p.name for p in parameters]
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    _check_names(name, known, named)
    if len(args) > len(positional):
        raise TargetError(
            f"{name}: only {' and '.join(positional)} may be given by position; give the rest by name, as in "
            f"{known[len(positional)]}=..."
        )
    arguments = {**dict(zip(positional, args, strict=False)), **named}
    for argument, text in missing.items():
        if arguments.get(argument) is None:
            raise TargetError(f"{argument}: missing; {text}")
