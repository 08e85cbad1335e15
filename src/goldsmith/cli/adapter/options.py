"""The options of `goldsmith adapter`; imports nothing heavy, so that --help answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..help_text import CommandGroup, grouped, joined
from ..terminal import in_a_paragraph

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="The base model: a folder, or a hub name that this machine has a copy of."),
]
Adapter = Annotated[str, typer.Argument(metavar="ADAPTER", help="The folder of a peft adapter for this model.")]


CHECK = {"What to check": ("model", "adapter", "runtime", "text", "merged"), "Output": ("json",)}
EXPORT = {"What to write": ("model", "adapter"), "Output": ("output", "json")}


def register(app: typer.Typer) -> None:
    """Add the command group to the program, once."""
    if any(group.name == "adapter" for group in app.registered_groups):
        return
    group = typer.Typer(
        cls=CommandGroup,
        help="Check that other runtimes apply an adapter, or write it in the layout that they read.",
        no_args_is_help=True, rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    )  # fmt: skip
    group.command("check", cls=grouped(CHECK), help=joined(check.__doc__ or ""))(in_a_paragraph(check))
    group.command("export", cls=grouped(EXPORT), help=joined(export.__doc__ or ""))(in_a_paragraph(export))
    app.add_typer(group, name="adapter")


def check(
    model: Model,
    adapter: Adapter,
    runtime: Annotated[
        list[str] | None,
        typer.Option(help="ours, peft, merged, vllm or sglang; repeatable. Default: all of them.", metavar="NAME"),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A text file whose tokens every runtime computes. Default: a few sentences.", metavar="FILE"),
    ] = None,
    merged: Annotated[
        Path | None, typer.Option(help="A merged model to check. Default: the command merges one.", metavar="DIR")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the same tokens with an adapter through several runtimes, and compare each with the trained model.

    A runtime that is not installed, or whose memory is too small, is left out. For each other one the output says
    whether it applies the adapter, drops it, transposes a factor or scales it.

    Exit status: 0 the adapter arrives in every runtime that ran, 1 it does not, or this cannot be told, 2 the command
    could not run, 130 interrupted.
    """
    from .command import run_check

    raise typer.Exit(run_check(model, adapter, runtime, text, merged, as_json=json))


def export(
    model: Model,
    adapter: Adapter,
    output: Annotated[Path, typer.Option(help="The folder to write the adapter to.", metavar="DIR")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write an adapter with one pair of factors per expert, as vLLM and SGLang read it for most models.

    All pairs get one rank and the scaling 1, because these loaders ignore peft's patterns. The effect is the same.
    """
    from .command import run_export

    raise typer.Exit(run_export(model, adapter, output, as_json=json))
