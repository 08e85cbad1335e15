"""`goldsmith bench kernelfault` and `goldsmith bench offload`, which have moved to the repository's benchmarks/ folder.

In a checkout they still run, with a warning: until version 0.3.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from ..help_text import program_help
from ..terminal import Problem, in_a_paragraph, print_paragraph

CHECKOUT = "python -m benchmarks.bench"
PEERS_ELSEWHERE = f"Peers are compared in a checkout of goldsmith's repository: `{CHECKOUT} --against PEER`."
MOVED = ("kernelfault", "offload")
ROOT = Path(__file__).resolve().parents[4]


class TwoWordCommands(TyperGroup):
    """Reads `bench kernelfault` and `bench offload` as one command each; any other `bench` times operators."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(program_help(self, ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        both = " ".join(args[:2])
        if len(args) > 1 and both in self.commands:
            args = [both, *args[2:]]
        return super().resolve_command(ctx, args)


def register(app: typer.Typer) -> None:
    """Add both to the program, hidden from its help."""
    app.info.cls = TwoWordCommands
    everything = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    for name in MOVED:
        if not any(command.name == f"bench {name}" for command in app.registered_commands):
            app.command(f"bench {name}", hidden=True, context_settings=everything)(in_a_paragraph(_forward(name)))


def _forward(name: str) -> Callable[[typer.Context], None]:
    def forward(context: typer.Context) -> None:
        module = f"benchmarks.{name}"
        if not (ROOT / "benchmarks" / name / "__main__.py").is_file():
            raise Problem(f"bench {name} has moved: run `python -m {module}` in a checkout of goldsmith's repository.")
        print_paragraph(
            f"DeprecationWarning: `goldsmith bench {name}` has moved to `python -m {module}`, run from {ROOT}."
        )
        raise typer.Exit(_run(module, context.args))

    return forward


def _run(module: str, arguments: Sequence[str]) -> int:
    """The module's exit status. An interrupt reaches both processes, and the module ends by itself."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", module, *arguments]
    child = subprocess.Popen(command, env=environment)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue
