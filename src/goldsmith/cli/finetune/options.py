"""The options of `goldsmith finetune`. Nothing heavy is imported here, so that --help answers at once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..openmp import spin_briefly
from ..terminal import in_a_paragraph


class TrainingDtypeOption(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"


class ScheduleOption(StrEnum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"


class DocumentOption(StrEnum):
    blank = "blank"
    whole = "whole"


class TrainOnOption(StrEnum):
    completion = "completion"
    all = "all"


class FormatOption(StrEnum):
    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"
    int4 = "int4"
    int4_asym = "int4_asym"
    mxfp4 = "mxfp4"
    fp8_block = "fp8_block"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    if not any(command.name == "finetune" for command in app.registered_commands):
        app.command("finetune")(in_a_paragraph(finetune))


def finetune(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A folder in the layout of transformers, or the name of one on the hub."),
    ],
    data: Annotated[
        Path,
        typer.Option(
            help="Text (.txt, .md), or .jsonl with a row a line: text; prompt and completion; or messages.",
            metavar="FILE",
            show_default=False,
        ),
    ],
    output: Annotated[
        str, typer.Option(help="Adapter, log, page and checkpoints go here.", metavar="DIR")
    ] = "finetuned",
    eval_data: Annotated[
        Path | None, typer.Option(help="Held-out text, in the same forms, whose loss is followed.", metavar="FILE")
    ] = None,
    document: Annotated[
        DocumentOption,
        typer.Option(help="What a document is in a text file: what stands between blank lines, or all of it."),
    ] = DocumentOption.blank,
    train_on: Annotated[
        TrainOnOption,
        typer.Option(help="Tokens whose loss counts: completions and what the assistant says, or every token."),
    ] = TrainOnOption.completion,
    format: Annotated[
        FormatOption,
        typer.Option(help="How the experts' frozen weights are held; auto is bf16, or a checkpoint's own codes."),
    ] = FormatOption.auto,
    group_size: Annotated[
        int | None,
        typer.Option(help="Weights that share a scale (int8, int4, int4_asym). Default: the format's.", min=1),
    ] = None,
    rank: Annotated[int, typer.Option(help="Rank of the LoRA.", min=1)] = 8,
    alpha: Annotated[float, typer.Option(help="LoRA is scaled by alpha / rank.")] = 16.0,
    targets: Annotated[
        str, typer.Option(help="Projections of each expert that get LoRA.", metavar="LIST")
    ] = "gate,up,down",
    shared_a: Annotated[
        bool, typer.Option("--shared-a", help="gate and up share their A, as in peft's own training.")
    ] = False,
    dropout: Annotated[float, typer.Option(help="Dropout in front of the LoRA.")] = 0.0,
    lora_modules: Annotated[
        str,
        typer.Option(
            help="Linear layers, or routers, that get LoRA as well, as q_proj,v_proj. Default: none.", metavar="LIST"
        ),
    ] = "",
    train_router: Annotated[
        bool, typer.Option("--train-router", help="Train the routers' own weights as well.")
    ] = False,
    dtype: Annotated[
        TrainingDtypeOption, typer.Option(help="Of activations, and of weights that are not experts'.")
    ] = TrainingDtypeOption.fp32,
    seq_len: Annotated[int, typer.Option(help="Longest row, in tokens.", min=2)] = 512,
    pack: Annotated[
        bool, typer.Option("--pack/--no-pack", help="Put documents side by side in a row; they do not see each other.")
    ] = True,
    batch_size: Annotated[int, typer.Option(help="Rows in memory at a time.", min=1)] = 4,
    grad_accum: Annotated[int, typer.Option(help="Batches whose gradients make one step.", min=1)] = 1,
    lr: Annotated[float, typer.Option(help="Learning rate after warmup.")] = 2e-4,
    schedule: Annotated[
        ScheduleOption, typer.Option(help="Course of the rate after warmup, down to zero.")
    ] = ScheduleOption.cosine,
    warmup: Annotated[float, typer.Option(help="Steps until the full rate; below 1, a share of all steps.")] = 0.03,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.")] = 0.0,
    max_grad_norm: Annotated[float, typer.Option(help="Longer gradients are shortened to this; 0: never.")] = 1.0,
    steps: Annotated[int | None, typer.Option(help="Train for so many steps. Default: see --epochs.", min=1)] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Go through the data so many times. Default: 1, without --steps.", min=1)
    ] = None,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.", min=1)] = 50,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between evaluations. Default: a tenth of all steps.", min=1)
    ] = None,
    keep: Annotated[int, typer.Option(help="Checkpoints that are kept.", min=1)] = 2,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations in the backward instead of keeping them.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the LoRA's beginning, the order of the data and dropout.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Threads that compute. Default: torch's own.", min=1)] = None,
    partitions: Annotated[int, typer.Option(help="Slices of each expert, one for each NUMA node.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="Where all is computed: cpu, or cuda, which takes --dtype bf16.")] = "cpu",
    resume: Annotated[
        str,
        typer.Option(
            help="auto: go on from the last checkpoint in --output, if there is one; never: begin anew, and put away "
            "what is there; or the folder of a checkpoint.",
            metavar="auto|never|PATH",
        ),
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be trained and what memory it takes, and stop.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; all else goes to stderr.")] = False,
) -> None:
    """Fine-tune the experts of a mixture-of-experts model with LoRA; the result is an adapter for peft.

    On the CPU frozen experts are held once, packed in any of the formats. After Ctrl-C, a crash or kill -9 the same
    command goes on from the last checkpoint, and there ends with the same bits as without. Exit status: 0 trained to
    the end, 1 the loss is not finite any more, 2 the command cannot be carried out, 130 interrupted.
    """
    spin_briefly()
    from .command import run

    given: dict[str, Any] = {name: value for name, value in locals().items() if name not in ("run", "dry_run", "json")}
    raise typer.Exit(run(_plain(given), dry_run=dry_run, as_json=json))


def _plain(given: dict[str, Any]) -> dict[str, Any]:
    """Words, numbers and tuples of them, as a run records them."""
    for name in ("targets", "lora_modules"):
        given[name] = tuple(word.strip() for word in given[name].split(",") if word.strip())
    return {
        name: value.value if isinstance(value, StrEnum) else str(value) if isinstance(value, Path) else value
        for name, value in given.items()
    }
