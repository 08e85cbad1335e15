"""Options that several commands take; imports nothing heavy, so that --help answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[Path | None, typer.Option(help="Folder for temporary files. Default: the system's.", metavar="DIR")]


def program() -> typer.Typer:
    """A program of one command."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
                       context_settings={"help_option_names": ["-h", "--help"]})  # fmt: skip


def split(words: tuple[str, ...]) -> list[str]:
    """Values of an option that takes commas and may be repeated."""
    return list(dict.fromkeys(part.strip() for word in words for part in word.split(",") if part.strip()))
