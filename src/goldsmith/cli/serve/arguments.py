"""The options of `goldsmith serve`, each a field; imports nothing heavy, so that --help answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..generate.arguments import ModelArguments


@dataclass(frozen=True, kw_only=True)
class ServeArguments(ModelArguments):
    """Answer requests of OpenAI's API with a mixture-of-experts model whose experts need not fit on the GPU.

    Chat completions, completions and models, whole or streamed, for any client of that API. Requests that run at the
    same time share every step. A request's text is that of `goldsmith generate` with the same options.

    The server listens on this machine only unless --host says otherwise. No request can read a file, open an address or
    load a model.

    Ctrl-C ends it within seconds, and every open request gets an answer. Exit status: 0 after Ctrl-C, 2 the server
    could not start.
    """

    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="A peft adapter, as FOLDER or NAME=FOLDER: a request whose model is NAME is answered with it.",
            metavar="[NAME=]DIR",
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(help="The model's name in requests. Default: the name of its folder.", metavar="NAME"),
    ] = None
    host: Annotated[
        str,
        typer.Option(help="Address to listen on. Default: this machine only; 0.0.0.0: every machine that reaches it."),
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.", min=0, max=65535)] = 8000
    parallel: Annotated[int, typer.Option(help="Maximum number of requests that compute together.", min=1)] = 16
    context: Annotated[
        int | None,
        typer.Option(help="Maximum number of tokens of a request, prompt and text. Default: the model's.", min=2),
    ] = None
    total_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of all requests that compute together, for whose keys and values memory is kept. Default: "
            "4,096 for each, and at least one whole context.",
            min=2,
        ),
    ] = None
    queue: Annotated[int, typer.Option(help="Requests that may wait; more are refused with status 503.", min=1)] = 64
    profile: Annotated[
        Path | None,
        typer.Option(help="Profile of the experts in use, for --cache static.", metavar="FILE"),
    ] = None
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when the server listens: url, models, memory, limits.")
    ] = False
