"""The text of --help: at most 80 columns, options grouped by purpose, each with the name of its value.

Typer's own help gives half of a narrow terminal to types such as `<int range> [x>=1]`.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from enum import Enum
from inspect import cleandoc
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .doors import BEGIN, DOORS

WIDTH = 80
COLUMN = 27  # where the explanations begin
VALUES = {"int": "N", "integer": "N", "float": "X", "Path": "PATH", "path": "PATH"}  # of options without metavar
HELP = "Help"

Groups = Mapping[str, Sequence[str]]


def grouped(groups: Groups) -> type[TyperCommand]:
    """A command class whose help shows its parameters in these groups: heading -> names, as in the function."""

    class Grouped(TyperCommand):
        """A command with grouped help."""

        purposes = groups

        def format_help(self, ctx: Any, formatter: Any) -> None:
            formatter.write(command_help(self, ctx, groups))

    return Grouped


class CommandGroup(TyperGroup):
    """A group of commands, such as `goldsmith adapter`, whose help has one line for each."""

    purposes: Groups = {}  # it has no options of its own

    def format_help(self, ctx: Any, formatter: Any) -> None:
        commands: list[tuple[str, Any]] = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        entries = [(name, command.get_short_help_str(limit=200)) for name, command in commands]
        options = [_entry(parameter) for parameter in self.get_params(ctx)]
        parts = [
            _usage(self, ctx),
            _paragraphs(self.help or ""),
            _section("Commands", entries),
            _section(HELP, options),
        ]
        formatter.write("\n\n".join(part for part in parts if part) + "\n")


def command_help(command: Any, ctx: Any, groups: Groups) -> str:
    """The whole help of a command."""
    parts = [_usage(command, ctx), _paragraphs(command.help or "")]
    parameters = {parameter.name: parameter for parameter in command.get_params(ctx)}
    for heading, names in groups.items():
        parts.append(_section(heading, [_entry(parameters.pop(name)) for name in names if name in parameters]))
    rest = [_entry(parameter) for parameter in parameters.values() if not getattr(parameter, "hidden", False)]
    return "\n\n".join(part for part in [*parts, _section(HELP, rest)] if part) + "\n"


def program_help(group: Any, ctx: Any) -> str:
    """The help of the program: its commands by door, each in one line, where to begin, and the options."""
    commands = [(name, group.get_command(ctx, name)) for name in group.list_commands(ctx)]
    entries = {name: (name, c.get_short_help_str(limit=200)) for name, c in commands if not c.hidden}
    parts = [_usage(group, ctx), _paragraphs(group.help or "")]
    for door, names in DOORS.items():
        parts.append(_section(door, [entries.pop(name) for name in names if name in entries]))
    parts += [_section("Further commands", list(entries.values())), _section("Where to begin", BEGIN)]
    options = [_entry(parameter) for parameter in group.get_params(ctx)]
    closing = _paragraphs(f"{ctx.command_path} COMMAND --help explains one command.")
    return "\n\n".join(part for part in [*parts, _section("Options", options), closing] if part) + "\n"


def joined(text: str) -> str:
    """Each paragraph in one line, because rich keeps line ends and also breaks lines at the terminal's width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in cleandoc(text).split("\n\n"))


def _width() -> int:
    return max(40, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def _usage(command: Any, ctx: Any) -> str:
    pieces = " ".join(command.collect_usage_pieces(ctx)).replace("{", "").replace("}", "")
    return _fill(f"Usage: {ctx.command_path} {pieces}", hang=7)


def _paragraphs(text: str) -> str:
    return "\n\n".join(_fill(" ".join(p.split())) for p in cleandoc(text).split("\n\n") if p.strip())


def _section(heading: str, entries: Sequence[tuple[str, str]]) -> str:
    if not entries:
        return ""
    column = min(COLUMN, max(len(label) for label, _ in entries) + 4)
    lines = [typer.style(heading, bold=True)]
    for label, text in entries:
        start = f"  {label}".ljust(column)
        if len(start) > column - 1 and not start.endswith(" "):
            lines.append(start)
            start = " " * column
        lines.append(
            textwrap.fill(
                text, _width(), initial_indent=start, subsequent_indent=" " * column,
                break_long_words=False, break_on_hyphens=False,
            )
        )  # fmt: skip
    return "\n".join(lines)


def _entry(parameter: Any) -> tuple[str, str]:
    """The label of a parameter (its flags and the name of its value), and its explanation with choices and default."""
    text = (getattr(parameter, "help", None) or "").strip()
    if parameter.param_type_name == "argument":
        return (parameter.metavar or parameter.name.upper()), text
    flags = [*parameter.opts, *parameter.secondary_opts]
    joined = "/".join(flags) if parameter.secondary_opts else ", ".join(sorted(flags, key=len))
    kind, choices = _kind(parameter)
    value = "" if parameter.is_flag else f" {parameter.metavar or VALUES.get(kind, 'NAME' if choices else 'TEXT')}"
    if choices:
        text += f" One of: {', '.join(choices)}."
    default = parameter.default
    default = default.value if isinstance(default, Enum) else default
    shown = default not in (None, "", (), []) and not isinstance(default, bool) and not callable(default)
    if shown and "Default:" not in text and parameter.show_default is not False:
        text += f" Default: {default:g}." if isinstance(default, float) else f" Default: {default}."
    return joined + value, text


def _kind(parameter: Any) -> tuple[str, list[str]]:
    """The name of a parameter's type, and its choices; typer 0.29 keeps an annotation, earlier ones a click type."""
    descriptor = getattr(parameter, "type_descriptor", None)
    if descriptor is None:
        return str(parameter.type.name).split()[0], [str(c) for c in getattr(parameter.type, "choices", ())]
    kind = descriptor.annotation
    choices = [str(member.value) for member in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []
    return getattr(kind, "__name__", str(kind)), choices


def _fill(text: str, hang: int = 0) -> str:
    hanging = " " * hang
    return textwrap.fill(text, _width(), subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
