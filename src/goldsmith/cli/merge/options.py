"""The options of `goldsmith merge`; imports nothing heavy, so that --help answers at once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..help_text import grouped, joined
from ..terminal import in_a_paragraph


class MergedFormat(StrEnum):
    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"
    int4 = "int4"
    fp8_block = "fp8_block"


GROUPS = {"What to merge": ("model", "adapter"), "Output": ("output", "format", "json")}


def register(app: typer.Typer) -> None:
    """Add the command to the program, once."""
    if not any(command.name == "merge" for command in app.registered_commands):
        app.command("merge", cls=grouped(GROUPS), help=joined(merge.__doc__ or ""))(in_a_paragraph(merge))


def merge(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="The base model: a folder, or a hub name that this machine has a copy of."
        ),
    ],
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="The folder of a peft adapter for this model.")],
    output: Annotated[Path, typer.Option(help="The folder to write, which must not exist yet.", metavar="DIR")],
    format: Annotated[
        MergedFormat,
        typer.Option(
            help="auto: as in MODEL. int4 and fp8_block store the experts as codes, which rounds the adapter too."
        ),
    ] = MergedFormat.auto,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a model with an adapter merged into its weights.

    One layer is in memory at a time. In MODEL's own float format the result equals peft's merge bit for bit. Rounding
    can lose an adapter: the output says which share arrives, and warns below 0.9. `goldsmith generate --adapter` loses
    nothing.

    Exit status: 0 written, 2 the command could not run and wrote nothing, 130 interrupted.
    """
    from .command import run

    raise typer.Exit(run(model, adapter, output, format.value, as_json=json))
