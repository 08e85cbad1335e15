"""The options of `goldsmith serve`; imports nothing heavy, so that --help answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..finetune.options import FormatOption
from ..generate.options import (
    BudgetOption,
    CacheOption,
    CachePolicyOption,
    ComputeChoiceOption,
    ComputeOption,
    DenseFormatChoiceOption,
    DenseFormatOption,
    DeviceOption,
    GuardChoiceOption,
    GuardOption,
    ModelOption,
    PrefillOption,
    StoreFormatOption,
    StoreOption,
    ThreadsOption,
    VerifyStoreOption,
    joined,
)
from ..help_text import grouped
from ..openmp import spin_briefly
from ..terminal import in_a_paragraph
from .arguments import ServeArguments

GROUPS = {
    "Model and names": ("model", "adapter", "name"),
    "Address": ("host", "port"),
    "Requests": ("parallel", "context", "total_tokens", "queue"),
    "Where experts are and run": (
        "budget", "format", "dense_format", "compute", "cache", "prefill", "device", "threads", "store", "verify_store",
        "profile",
    ),
    "Output": ("guard", "json"),
}  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the command to the program, once."""
    if not any(command.name == "serve" for command in app.registered_commands):
        app.command("serve", cls=grouped(GROUPS), help=joined(serve.__doc__ or ""))(in_a_paragraph(serve))


def serve(
    model: ModelOption,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="A peft adapter, as FOLDER or NAME=FOLDER: a request whose model is NAME is answered with it.",
            metavar="[NAME=]DIR",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="The model's name in requests. Default: the name of its folder.", metavar="NAME"),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on. Default: this machine only; 0.0.0.0: every machine that reaches it."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.", min=0, max=65535)] = 8000,
    parallel: Annotated[int, typer.Option(help="Maximum number of requests that compute together.", min=1)] = 16,
    context: Annotated[
        int | None,
        typer.Option(help="Maximum number of tokens of a request, prompt and text. Default: the model's.", min=2),
    ] = None,
    total_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of all requests that compute together, for whose keys and values memory is kept. Default: "
            "4,096 for each, and at least one whole context.",
            min=2,
        ),
    ] = None,
    queue: Annotated[int, typer.Option(help="Requests that may wait; more are refused with status 503.", min=1)] = 64,
    budget: BudgetOption = "auto",
    format: StoreFormatOption = FormatOption.auto,
    dense_format: DenseFormatChoiceOption = DenseFormatOption.exact,
    compute: ComputeChoiceOption = ComputeOption.exact,
    cache: CachePolicyOption = CacheOption.lru,
    prefill: PrefillOption = "auto",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    store: StoreOption = None,
    verify_store: VerifyStoreOption = False,
    profile: Annotated[
        Path | None,
        typer.Option(help="Profile of the experts in use, for --cache static.", metavar="FILE"),
    ] = None,
    guard: GuardChoiceOption = GuardOption.throw,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when the server listens: url, models, memory, limits.")
    ] = False,
) -> None:
    """Answer requests of OpenAI's API with a mixture-of-experts model whose experts need not fit on the GPU.

    Chat completions, completions and models, whole or streamed, for any client of that API. Requests that run at the
    same time share every step. A request's text is that of `goldsmith generate` with the same options.

    The server listens on this machine only unless --host says otherwise. No request can read a file, open an address or
    load a model.

    Ctrl-C ends it within seconds, and every open request gets an answer. Exit status: 0 after Ctrl-C, 2 the server
    could not start.
    """
    spin_briefly()
    from .command import run

    arguments = ServeArguments(
        model=model,
        adapter=adapter,
        name=name,
        host=host,
        port=port,
        parallel=parallel,
        context=context,
        total_tokens=total_tokens,
        queue=queue,
        budget=budget,
        format=format.value,
        dense_format=dense_format.value,
        compute=compute.value,
        cache=cache.value,
        prefill=prefill,
        device=device,
        threads=threads,
        store=store,
        verify_store=verify_store,
        profile=profile,
        guard=guard.value,
        json=json,
    )
    raise typer.Exit(run(arguments))
