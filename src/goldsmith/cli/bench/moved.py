"""What `goldsmith bench` passes on to the repository's benchmarks/ folder.

`bench generate` runs there, because its peers are not installed with goldsmith. `bench kernelfault`, `bench offload`,
peers, and modules made of several operators have moved there since version 0.1, and still run in a checkout, with a
warning: until version 0.3.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from ...assay.gate.isolation.own_process import own_process
from ..help_text import program_help
from ..terminal import Failure, in_a_paragraph, print_paragraph

CHECKOUT = "python -m benchmarks.bench"
PEERS_ELSEWHERE = f"Peers are compared in a checkout of goldsmith's repository: `{CHECKOUT} --against PEER`."
MOVED = ("kernelfault", "offload")
ELSEWHERE = ("generate",)  # part of `goldsmith bench`, but not of the installed package
MODULES = ("mhc.connection", "router.peer", "router.memory")
COMPARISON = "bench with peers"  # the command's own name: `goldsmith bench` leads there
ROOT = Path(__file__).resolve().parents[4]


class TwoWordCommands(TyperGroup):
    """Reads `bench generate`, `bench kernelfault`, `bench offload` as commands of their own.

    And, in a checkout, `bench` with peers or modules.

    Any other `bench` times operators.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(program_help(self, ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        both = " ".join(args[:2])
        if len(args) > 1 and both in self.commands:
            args = [both, *args[2:]]
        elif args[:1] == ["bench"] and _compares(args[1:]) and (ROOT / "benchmarks" / "bench.py").is_file():
            args = [COMPARISON, *args[1:]]
        return super().resolve_command(ctx, args)


def register(app: typer.Typer) -> None:
    """Add these commands to the program, hidden from its help."""
    app.info.cls = TwoWordCommands
    everything = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    commands = {f"bench {name}": _forward(name) for name in (*MOVED, *ELSEWHERE)} | {COMPARISON: _compare}
    for name, command in commands.items():
        if not any(registered.name == name for registered in app.registered_commands):
            app.command(name, hidden=True, context_settings=everything)(in_a_paragraph(command))


def _compares(arguments: Sequence[str]) -> bool:
    """Whether the arguments of `bench` name a module or a peer."""
    peers = [value for option, value in pairwise(arguments) if option == "--against"]
    peers += [word.partition("=")[2] for word in arguments if word.startswith("--against=")]
    return not set(MODULES).isdisjoint(arguments) or any(peer != "none" for peer in peers)


def _compare(context: typer.Context) -> None:
    print_paragraph(
        f"DeprecationWarning: `goldsmith bench` with peers or modules has moved to `{CHECKOUT}`, run from {ROOT}."
    )
    raise typer.Exit(_run("benchmarks.bench", context.args))


def _forward(name: str) -> Callable[[typer.Context], None]:
    def forward(context: typer.Context) -> None:
        module = f"benchmarks.{name}"
        if not (ROOT / "benchmarks" / name / "__main__.py").is_file():
            why = "has moved" if name in MOVED else "needs peers that are not installed with goldsmith"
            raise Failure(f"bench {name} {why}: run `python -m {module}` in a checkout of goldsmith's repository.")
        if name in MOVED:
            print_paragraph(
                f"DeprecationWarning: `goldsmith bench {name}` has moved to `python -m {module}`, run from {ROOT}."
            )
        raise typer.Exit(_run(module, context.args))

    return forward


def _run(module: str, arguments: Sequence[str]) -> int:
    """The module's exit status. An interrupt reaches both processes, and the module ends by itself."""
    command, environment = own_process(module, *arguments, folders=(str(ROOT),))
    child = subprocess.Popen(command, env=environment)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue
