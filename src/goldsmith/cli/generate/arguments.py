"""The options of `goldsmith generate`, each a field; imports nothing heavy, so that --help answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..finetune.options import FormatOption


class CacheOption(StrEnum):
    lru = "lru"
    lfu = "lfu"
    static = "static"
    none = "none"


class ComputeOption(StrEnum):
    auto = "auto"
    exact = "exact"
    int8 = "int8"


class DenseFormatOption(StrEnum):
    exact = "exact"
    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"
    int4 = "int4"
    int4_asym = "int4_asym"
    mxfp4 = "mxfp4"
    fp8_block = "fp8_block"


class GuardOption(StrEnum):
    throw = "raise"
    warn = "warn"
    off = "off"


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """The options of a model, of its store and its engine, in every command that generates text; each command explains
    `adapter` and `profile` itself."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model folder in the transformers layout, a GGUF file, or a hub name that this machine has a copy "
            "of.",
        ),
    ]
    adapter: list[str] | None = None
    budget: Annotated[
        str,
        typer.Option(
            help="GPU memory for experts: auto, a number of bytes, or a size such as 6GiB, 6GB or 500MiB; 0: none.",
            metavar="SIZE",
        ),
    ] = "auto"
    format: Annotated[
        FormatOption,
        typer.Option(help="Format of the stored experts; auto keeps the exact weights, int8 and narrower save memory."),
    ] = FormatOption.auto
    dense_format: Annotated[
        DenseFormatOption,
        typer.Option(
            help="Format of all other linear layers, routers excepted; exact: the model's own weights. Only on the CPU."
        ),
    ] = DenseFormatOption.exact
    compute: Annotated[
        ComputeOption,
        typer.Option(
            help="Products of experts on the CPU. exact: float; int8: inputs are rounded to 8 bits, for --format int8, "
            "int4 or int4_asym, so that a layer's result is 1 to 2 % off (docs/offload.md, A step on the CPU); auto: "
            "as exact."
        ),
    ] = ComputeOption.exact
    cache: Annotated[
        CacheOption,
        typer.Option(help="Experts kept on the GPU: lru: last used; lfu: most used; static: those of --profile; none."),
    ] = CacheOption.lru
    prefill: Annotated[
        str,
        typer.Option(
            help="Where prompts of more than 16 tokens are computed: auto, cpu, split (CPU and GPU) or stream (whole "
            "layers are copied to the GPU); or a number: stream from this many tokens on.",
            metavar="HOW",
        ),
    ] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto"
    threads: Annotated[
        int | None,
        typer.Option(help="Threads for experts on the CPU. Default: all; with a GPU, all but one.", min=1),
    ] = None
    store: Annotated[
        Path | None,
        typer.Option(
            help="The store (file of experts), built if it is missing. Default: in the cache folder.", metavar="PATH"
        ),
    ] = None
    verify_store: Annotated[
        bool, typer.Option("--verify-store", help="First read the whole store and check its checksums.")
    ] = False
    profile: Path | None = None
    guard: Annotated[GuardOption, typer.Option(help="What to do when a NaN or Inf appears.")] = GuardOption.throw


@dataclass(frozen=True, kw_only=True)
class GenerateArguments(ModelArguments):
    """Generate text with a mixture-of-experts model whose experts need not fit on the GPU.

    An adapter's LoRA is computed beside the experts, whose weights do not change: the text equals peft's.

    The first run writes the experts to a file, the store. Some experts are computed on the CPU, the others on the GPU.
    The text equals the plain model's, except where two logits or router scores tie in 16 bits. Ctrl-C keeps the text so
    far.

    Exit status: 0 success, 1 a NaN or Inf appeared (the output names its origin), 2 the command could not run, 130
    interrupted.
    """

    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="A peft adapter, as FOLDER or NAME=FOLDER. Several: each prompt is answered with each of them.",
            metavar="[NAME=]DIR",
        ),
    ] = None
    prompt: Annotated[
        list[str] | None, typer.Option(help="Beginning of the text; several prompts make a batch.", metavar="TEXT")
    ] = None
    prompt_file: Annotated[
        str | None, typer.Option(help="A file whose whole text is one more prompt; - means stdin.", metavar="FILE")
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap each prompt as a user message in the tokenizer's chat template.")
    ] = False
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens per prompt.", min=1)] = 128
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.", min=0.0)] = 0.0
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the most likely tokens that add up to this probability. Default: all."),
    ] = None
    top_k: Annotated[
        int | None, typer.Option(help="Sample from this many most likely tokens. Default: all.", min=1)
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Profile of the experts in use: read with --cache static, otherwise written at the end.",
            metavar="FILE",
        ),
    ] = None
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream", help="Print text as it is generated. Default: yes, unless --json is given."
        ),
    ] = None
    stats: Annotated[
        bool, typer.Option("--stats", help="Print speed, use of the lanes and the bottleneck to stderr.")
    ] = False
    trace: Annotated[
        Path | None, typer.Option(help="Write a timeline of the lanes, for chrome://tracing.", metavar="FILE")
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object: outputs, stats, explain.")] = False
