"""The options of `python -m benchmarks.model_step`; the rest is imported when the command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from goldsmith.cli.bench.options import Commit, Device, Json
from goldsmith.cli.terminal import in_a_paragraph

from ..common.options import program, split

app = program()


@app.command("benchmarks.model_step")
@in_a_paragraph
def model_step(
    way: Annotated[
        list[str] | None,
        typer.Option(
            help="plain (transformers), compiled (torch.compile), liger (Liger's functions in the layers), goldsmith "
            "(hf.apply), goldsmith-compiled. Default: all that run here.",
            metavar="WAY",
        ),
    ] = None,
    dim: Annotated[int, typer.Option(help="Hidden size.", min=32)] = 4096,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    experts: Annotated[int, typer.Option(help="Experts of a layer, 6 of them for each token.", min=6)] = 16,
    rows: Annotated[int, typer.Option(help="Texts in a batch.", min=1)] = 2,
    length: Annotated[int, typer.Option(help="Tokens of a text.", min=8)] = 2048,
    steps: Annotated[int, typer.Option(help="Timed steps, after three others.", min=1)] = 10,
    float32: Annotated[bool, typer.Option("--float32", help="float32 instead of bfloat16.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Time ours without verifying its operators.")] = False,
    device: Device = None,
    json: Json = None,
    commit: Commit = "",
) -> None:
    """Time a training step of a small model with DeepSeek-V4's shapes and random weights, and its peak memory.

    A step is the forward with the loss, the backward and AdamW. Each way trains
    the same weights on the same text, and its first gradients are compared with
    those of plain transformers. Our operators are verified first.

    Exit status: 0 all results are right, 1 a result is wrong, 2 the command could not run.
    """
    from .run import StepRequest, run

    request = StepRequest(
        ways=tuple(split(tuple(way or ()))),
        dim=dim,
        layers=layers,
        experts=experts,
        rows=rows,
        length=length,
        steps=steps,
        dtype="float32" if float32 else "bfloat16",
        device=device,
        verify=not no_verify,
        commit=commit,
    )
    raise typer.Exit(run(request, json))
