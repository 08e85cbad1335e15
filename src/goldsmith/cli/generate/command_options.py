"""A command whose options are the fields of a dataclass, so that each option is written once."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TypeVar, get_type_hints

import typer

from ..help_text import Groups, grouped, joined
from ..openmp import spin_briefly
from ..terminal import in_a_paragraph

A = TypeVar("A")


def add_command(app: typer.Typer, name: str, options: type[A], groups: Groups, run: Callable[[A], int]) -> None:
    """Add a command to the program, once.

    options  a dataclass: each field is a parameter, annotated as typer wants it; the docstring is the command's help
    groups   heading -> fields, in the order of --help
    run      called with an `options`; returns the exit status
    """
    if any(command.name == name for command in app.registered_commands):
        return

    def command(**values: object) -> None:
        spin_briefly()
        raise typer.Exit(run(options(**values)))

    types = get_type_hints(options, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = []
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        parameters.append(inspect.Parameter(field.name, keyword, default=default, annotation=types[field.name]))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, cls=grouped(groups), help=joined(options.__doc__ or ""))(in_a_paragraph(command))
