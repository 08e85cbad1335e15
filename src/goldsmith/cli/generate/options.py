"""The options of `goldsmith generate`. Nothing heavy is imported here, so that --help answers at once."""

from __future__ import annotations

from enum import StrEnum
from inspect import cleandoc
from pathlib import Path
from typing import Annotated

import typer

from ..finetune.options import FormatOption
from ..openmp import spin_briefly
from ..terminal import in_a_paragraph
from .arguments import GenerateArguments


class CacheOption(StrEnum):
    lru = "lru"
    lfu = "lfu"
    static = "static"
    none = "none"


class GuardOption(StrEnum):
    throw = "raise"
    warn = "warn"
    off = "off"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    if not any(command.name == "generate" for command in app.registered_commands):
        app.command("generate", help=_joined(generate.__doc__ or ""))(in_a_paragraph(generate))


def _joined(text: str) -> str:
    """Paragraphs each in a line, for a terminal of whatever width: rich keeps line ends, and breaks lines besides."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in cleandoc(text).split("\n\n"))


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder in the layout of transformers, or a name from the hub that this machine has a copy of.",
        ),
    ],
    prompt: Annotated[
        list[str] | None, typer.Option(help="What the text begins with; several make a batch.", metavar="TEXT")
    ] = None,
    prompt_file: Annotated[
        str | None, typer.Option(help="A file whose whole text is one more prompt; - is stdin.", metavar="FILE")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is what a user says, put into the tokenizer's chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="At most so many tokens a prompt.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token each time.", min=0.0)] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens that make up this share. Default: all.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many tokens. Default: all.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    budget: Annotated[
        str, typer.Option(help="GPU memory for experts: auto, bytes, or 6GiB, 6GB, 500MiB; 0: none.", metavar="SIZE")
    ] = "auto",
    format: Annotated[
        FormatOption,
        typer.Option(help="How experts are stored; auto holds their weights exactly, int8 and narrower are smaller."),
    ] = FormatOption.auto,
    cache: Annotated[
        CacheOption,
        typer.Option(help="Which experts stay on the GPU: latest used, most used, those of --profile, none."),
    ] = CacheOption.lru,
    prefill: Annotated[
        str,
        typer.Option(
            help="Long prompts: auto, cpu, stream, split, or the number of tokens from which layers are streamed.",
            metavar="HOW",
        ),
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(help="Threads for experts on the CPU. Default: all, less one with a GPU.", min=1),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="The file of experts, made if it is missing. Default: in the cache folder.", metavar="PATH"),
    ] = None,
    verify_store: Annotated[
        bool, typer.Option("--verify-store", help="First read the whole file of experts and hold it to its checksums.")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(help="Experts that were used: read with --cache static, else written at the end.", metavar="FILE"),
    ] = None,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Print text as it comes. Default: yes, without --json.")
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Say on stderr how fast it was, through which lanes, and what limits it.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write what each lane did, for chrome://tracing.", metavar="FILE")
    ] = None,
    guard: Annotated[GuardOption, typer.Option(help="What happens when a NaN or Inf appears.")] = GuardOption.throw,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object: outputs, stats, explain.")] = False,
) -> None:
    """Generate text with a mixture-of-experts model whose experts need not fit on the GPU.

    Experts lie in a file that is made at first use; some are computed on the CPU where they lie, some on the GPU. The
    text is that of the plain model, up to ties that 16 bits make, of logits or in a router. Ctrl-C keeps what there is.

    Exit status: 0 all is well, 1 a NaN or Inf appeared (where it was born is said), 2 the command cannot be carried
    out, 130 interrupted.
    """
    spin_briefly()
    from .command import run

    arguments = GenerateArguments(
        model=model,
        prompt=prompt,
        prompt_file=prompt_file,
        chat=chat,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        budget=budget,
        format=format.value,
        cache=cache.value,
        prefill=prefill,
        device=device,
        threads=threads,
        store=store,
        verify_store=verify_store,
        profile=profile,
        stream=stream,
        stats=stats,
        trace=trace,
        guard=guard.value,
        json=json,
    )
    raise typer.Exit(run(arguments))
