"""The options of `goldsmith bench generate`; the rest is imported when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from goldsmith.cli.bench.options import Commit, Json
from goldsmith.cli.help_text import grouped
from goldsmith.cli.signals import exit_on_signals
from goldsmith.cli.terminal import in_a_paragraph, loading_torch

from ..common.options import Folder, program

app = program()

GROUPS = {
    "The model": ("model", "shape", "layers", "format", "dense_format"),
    "What to compare": ("against", "llama", "compute", "level", "device", "budget", "plan", "no_verify"),
    "How to time": ("prompt", "tokens", "rounds", "threads"),
    "Files and output": ("folder", "models", "json", "resume", "commit"),
}


@app.command("bench generate", cls=grouped(GROUPS))
@in_a_paragraph
def generate(
    model: Annotated[
        Path | None,
        typer.Option(help="A model folder of the type Qwen3-MoE, instead of a random model.", metavar="DIR"),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Sizes of the random model: qwen3-30b, qwen3-235b, small (8 layers, 32 experts), tiny. "
            "Default: small.",
            metavar="NAME,...",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="At most this many layers. Default: all that memory holds.", min=1)
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Peers: llama.cpp, transformers, kt-kernel, accelerate, torch.compile, none. Default: those that can "
            "run, without torch.compile, which takes minutes to compile.",
            metavar="PEER,...",
        ),
    ] = None,
    llama: Annotated[
        Path | None,
        typer.Option(help="The folder in which llama.cpp was built with shared libraries.", metavar="PATH"),
    ] = None,
    format: Annotated[
        list[str] | None,
        typer.Option(
            help="Format of the experts: int4 (Q4_0), int8 (Q8_0), bf16, fp32. Default: all four, and int4 with the "
            "dense part in fp32.",
            metavar="NAME,...",
        ),
    ] = None,
    dense_format: Annotated[
        list[str] | None,
        typer.Option(help="Format of all other matrices. Default: that of the experts.", metavar="NAME,..."),
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(help="goldsmith's arithmetic: exact, int8 or auto. Default: its own.", metavar="NAME"),
    ] = None,
    level: Annotated[
        str | None,
        typer.Option(
            help="Highest instruction level of the engines in Python, such as avx2. Default: the machine's, or that of "
            "GOLDSMITH_ISA.",
            metavar="NAME",
        ),
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.", min=16)] = 512,
    tokens: Annotated[int, typer.Option(help="Tokens decoded after a prompt of 16.", min=1)] = 128,
    rounds: Annotated[int, typer.Option(help="Rounds in which each engine has a turn.", min=1)] = 3,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of every engine. Default: all cores.", min=1, max=1024)
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1; the latter with experts split.")] = "cpu",
    budget: Annotated[
        list[str] | None,
        typer.Option(help="GPU memory for experts, such as 4GiB,12GiB. Default: auto.", metavar="SIZE,..."),
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option(
            help="How goldsmith assigns experts on a GPU: auto, or fixed: cpu (all on the CPU), copied (all copied), "
            "uncached (its own plan without a cache). Default: auto.",
            metavar="NAME,...",
        ),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Time without comparing logits first; the rows record this.")
    ] = False,
    folder: Folder = None,
    models: Annotated[
        Path | None,
        typer.Option(help="Keep the models that are written here, and use them again.", metavar="DIR"),
    ] = None,
    json: Json = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out what the rows of --json FILE already have from this commit.")
    ] = False,
    commit: Commit = "",
) -> None:
    """Time whole models from token to token, beside llama.cpp and others that run the same file.

    Writes a random model of real sizes as a GGUF file, and compares every
    engine's logits with the plain model's in float64. Then the engines take
    turns, each in a process of its own. At the end, goldsmith's own rates are
    compared: a narrower format, more GPU memory and the automatic plan must not
    be slower. A broken rule is reported and recorded.

    Exit status: 0 all logits agree, 1 some do not, 2 the command could not run, 130 interrupted.
    """
    with exit_on_signals(), loading_torch():
        from .run import GenerateRequest, run

    request = GenerateRequest(
        model=model,
        shapes=tuple(shape or ()),
        against=None if against is None else tuple(against),
        formats=tuple(format or ()),
        dense_formats=tuple(dense_format or ()),
        compute=compute,
        level=level,
        prompt=prompt,
        tokens=tokens,
        layers=layers,
        rounds=rounds,
        threads=threads,
        device=device,
        budgets=tuple(budget or ()),
        plans=tuple(plan or ()),
        llama=llama,
        folder=folder,
        models=models,
        verify=not no_verify,
        resume=resume,
        commit=commit,
    )
    raise typer.Exit(run(request, json))
