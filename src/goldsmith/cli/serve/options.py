"""The command `goldsmith serve` and the groups of its help."""

from __future__ import annotations

import typer

from ..generate.command_options import add_command
from ..generate.options import WHERE
from .arguments import ServeArguments

GROUPS = {
    "Model and names": ("model", "adapter", "name"),
    "Address": ("host", "port"),
    "Requests": ("parallel", "context", "total_tokens", "queue"),
    "Where experts are and run": WHERE,
    "Output": ("guard", "json"),
}


def register(app: typer.Typer) -> None:
    """Add the command to the program, once."""
    add_command(app, "serve", ServeArguments, GROUPS, _run)


def _run(arguments: ServeArguments) -> int:
    from .command import run

    return run(arguments)
