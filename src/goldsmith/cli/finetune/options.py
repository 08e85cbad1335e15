"""The options of `goldsmith finetune`; imports nothing heavy, so that --help answers at once."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, cast

import typer

from ..help_text import grouped
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


GROUPS = {
    "Model and data": ("model", "data", "eval_data", "document", "train_on", "seq_len", "pack"),
    "What is trained": ("rank", "alpha", "targets", "shared_a", "dropout", "lora_modules", "train_router"),
    "How it is trained": (
        "steps", "epochs", "batch_size", "grad_accum", "lr", "schedule", "warmup", "weight_decay", "max_grad_norm",
        "seed",
    ),
    "Memory and machine": (
        "format", "group_size", "dtype", "checkpointing", "device", "threads", "partitions",
    ),
    "Output and checkpoints": (
        "output", "resume", "save_every", "eval_every", "keep", "report_to", "dry_run", "json",
    ),
}  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the command to the program, once."""
    if not any(command.name == "finetune" for command in app.registered_commands):
        app.command("finetune", cls=grouped(GROUPS))(in_a_paragraph(finetune))


def finetune(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model folder in the transformers layout, a GGUF file, or a name on the Hugging Face hub.",
        ),
    ],
    data: Annotated[
        list[str],
        typer.Option(
            help="Text (.txt, .md), rows (.jsonl, .json, .csv, .parquet), a folder, or the name of a data set, with "
            ":SPLIT after it. Rows have text; prompt and completion; messages; ShareGPT's conversations; or Alpaca's "
            "instruction and output. Repeat the option for several.",
            metavar="FILE/NAME",
            show_default=False,
        ),
    ],
    output: Annotated[
        str, typer.Option(help="Folder for the adapter, log, page and checkpoints.", metavar="DIR")
    ] = "finetuned",
    eval_data: Annotated[
        list[str] | None,
        typer.Option(
            help="Held-out data, in the same formats. The log gets its loss, perplexity and token accuracy.",
            metavar="FILE/NAME",
        ),
    ] = None,
    document: Annotated[
        DocumentOption,
        typer.Option(help="How a text file is split into documents: blank: at blank lines; whole: not at all."),
    ] = DocumentOption.blank,
    train_on: Annotated[
        TrainOnOption,
        typer.Option(help="Tokens to train on: completion: completions and assistant messages; all: every token."),
    ] = TrainOnOption.completion,
    format: Annotated[
        FormatOption,
        typer.Option(help="Format of the frozen experts in memory; auto: bf16, or the checkpoint's own codes."),
    ] = FormatOption.auto,
    group_size: Annotated[
        int | None,
        typer.Option(help="Weights that share a scale (int8, int4, int4_asym). Default: depends on the format.", min=1),
    ] = None,
    rank: Annotated[int, typer.Option(help="Rank of the LoRA.", min=1)] = 8,
    alpha: Annotated[float, typer.Option(help="The LoRA output is scaled by alpha / rank.")] = 16.0,
    targets: Annotated[
        str, typer.Option(help="Projections of each expert that get a LoRA.", metavar="LIST")
    ] = "gate,up,down",
    shared_a: Annotated[
        bool, typer.Option("--shared-a", help="Train one A matrix for gate and up together, as peft does.")
    ] = False,
    dropout: Annotated[float, typer.Option(help="Dropout on the input of the LoRA.")] = 0.0,
    lora_modules: Annotated[
        str,
        typer.Option(
            help="Other linear layers, or routers, that get a LoRA, for example q_proj,v_proj. Default: none.",
            metavar="LIST",
        ),
    ] = "",
    train_router: Annotated[bool, typer.Option("--train-router", help="Also train the routers' own weights.")] = False,
    dtype: Annotated[
        TrainingDtypeOption, typer.Option(help="Dtype of activations and of all weights except the experts'.")
    ] = TrainingDtypeOption.fp32,
    seq_len: Annotated[int, typer.Option(help="Maximum length of a row, in tokens.", min=2)] = 512,
    pack: Annotated[
        bool,
        typer.Option("--pack/--no-pack", help="Pack several documents into a row; they do not attend to each other."),
    ] = True,
    batch_size: Annotated[int, typer.Option(help="Rows per batch.", min=1)] = 4,
    grad_accum: Annotated[int, typer.Option(help="Batches per optimizer step.", min=1)] = 1,
    lr: Annotated[float, typer.Option(help="Learning rate after warmup.")] = 2e-4,
    schedule: Annotated[
        ScheduleOption, typer.Option(help="Learning rate schedule after warmup; cosine and linear end at zero.")
    ] = ScheduleOption.cosine,
    warmup: Annotated[float, typer.Option(help="Number of warmup steps; below 1, their share of all steps.")] = 0.03,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of AdamW.")] = 0.0,
    max_grad_norm: Annotated[float, typer.Option(help="Clip gradients to this norm; 0: never.")] = 1.0,
    steps: Annotated[
        int | None, typer.Option(help="Number of steps. Default: as many as --epochs needs.", min=1)
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the data. Default: 1, unless --steps is given.", min=1)
    ] = None,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.", min=1)] = 50,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between evaluations. Default: a tenth of all steps.", min=1)
    ] = None,
    keep: Annotated[int, typer.Option(help="Number of checkpoints to keep.", min=1)] = 2,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations in the backward pass to save memory.")
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Seed of the LoRA's initial weights, the order of the data, and dropout.")
    ] = 0,
    threads: Annotated[int | None, typer.Option(help="Number of CPU threads. Default: torch's choice.", min=1)] = None,
    partitions: Annotated[int, typer.Option(help="Number of slices of each expert, one per NUMA node.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda; cuda needs --dtype bf16.")] = "cpu",
    resume: Annotated[
        str,
        typer.Option(
            help="auto: resume from the last checkpoint in --output, if there is one; never: start over, and move "
            "earlier files aside; PATH: resume from this checkpoint's folder.",
            metavar="auto/never/PATH",
        ),
    ] = "auto",
    report_to: Annotated[
        str,
        typer.Option(
            help="Trackers that also get the log, such as tensorboard,wandb: those of the package accelerate. Default: "
            "none.",
            metavar="LIST",
        ),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be trained and how much memory it needs, then stop.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON on stdout; everything else goes to stderr.")
    ] = False,
) -> None:
    """Fine-tune the experts of a mixture-of-experts model with LoRA, and write an adapter for peft.

    On the CPU, memory holds one copy of the frozen experts. After Ctrl-C, a crash
    or kill -9 the same command resumes from the last checkpoint. On a CPU, with
    as many threads, it ends with the same bits as an uninterrupted run.

    Exit status: 0 trained to the end, 1 the loss became NaN or Inf, 2 the command could not run, 130 interrupted.
    """
    spin_briefly()
    from .command import run

    values = {name: value for name, value in locals().items() if name not in ("run", "dry_run", "json")}
    raise typer.Exit(run(_plain(values), dry_run=dry_run, as_json=json))


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    """Enums and paths as strings, comma-separated lists as tuples."""
    plain = {
        name: value.value if isinstance(value, StrEnum) else str(value) if isinstance(value, Path) else value
        for name, value in values.items()
    }
    for name in ("data", "eval_data"):
        plain[name] = tuple(cast("list[str] | None", values[name]) or ())
    for name in ("targets", "lora_modules", "report_to"):
        plain[name] = tuple(word.strip() for word in str(plain[name]).split(",") if word.strip())
    return plain
