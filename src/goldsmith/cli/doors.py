"""Three ways into goldsmith: how `goldsmith --help` groups the commands, and where each begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

DOORS = {
    "Check my kernel": ("new", "verify", "diagnose", "replay"),
    "Train or run a mixture-of-experts model": ("finetune", "generate"),
    "Use the operators": ("doctor", "bench"),
}
BEGIN = """
Where to begin:
  [bold]goldsmith new my_kernel[/], then [bold]goldsmith verify my_kernel.py[/]
  [bold]goldsmith generate MODEL --prompt TEXT[/]
  [bold]goldsmith doctor[/], and in Python: [bold]from goldsmith import mhc, router, experts[/]
"""


def arrange(app: typer.Typer) -> None:
    """Put the commands into the order of the doors, each under its door."""
    order = [name for names in DOORS.values() for name in names]
    doors = {name: door for door, names in DOORS.items() for name in names}

    def place(command: typer.models.CommandInfo) -> int:
        name = _name(command)
        return order.index(name) if name in order else len(order)

    app.registered_commands.sort(key=place)
    for command in app.registered_commands:
        command.rich_help_panel = doors.get(_name(command), command.rich_help_panel)


def _name(command: typer.models.CommandInfo) -> str:
    return command.name or str(getattr(command.callback, "__name__", ""))
