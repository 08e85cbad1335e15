"""The options of `python -m benchmarks.offload`; the rest is imported when the command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from goldsmith.cli.bench.options import Commit, Device, Json
from goldsmith.cli.terminal import in_a_paragraph

from ..common.options import Folder, program

app = program()


@app.command("benchmarks.offload")
@in_a_paragraph
def offload(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT",
            help="What to time: calls (the experts alone), steps (a model's layers), guard (the cost of the guard), "
            "memory, store (the time to build, find, verify and open a store). Default: all.",
            show_default=False,
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Layer sizes: qwen3 (Qwen3-30B-A3B), v2-lite (DeepSeek-V2-Lite), tiny. Default: the first two with a "
            "GPU, otherwise tiny.",
            metavar="NAME",
        ),
    ] = None,
    layers: Annotated[int, typer.Option(help="Number of layers with experts; a layer of qwen3 has 1.2 GB.", min=1)] = 4,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens in a call. Default: with a GPU 1, 512 and 4096 (steps: 1 and 512), otherwise 1 and 32.",
            metavar="N",
            min=1,
        ),
    ] = None,
    cached: Annotated[
        list[float] | None,
        typer.Option(help="Share of the experts on the device, for decoding calls. Default: 0 and 0.5.", min=0, max=1),
    ] = None,
    format: Annotated[str, typer.Option(help="Format of the store; auto is bf16, which is exact.")] = "auto",
    device: Device = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of the CPU lane. Default: the engine's own.", min=1, max=1024)
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time budget of each timing.", min=0.01)] = 0.5,
    limit: Annotated[float | None, typer.Option(help="Start no new case after this many seconds.")] = None,
    no_peers: Annotated[
        bool, typer.Option("--no-peers", help="Time only our engine, with its own plan and with other rules.")
    ] = False,
    folder: Folder = None,
    json: Json = None,
    commit: Commit = "",
) -> None:
    """Time experts that are split over CPU and GPU, at the sizes of real layers, with random weights.

    Each case is first verified against the float64 reference. Peers in the same
    run: transformers with its experts on the CPU, accelerate's offload,
    everything on the GPU, and our engine with Fiddler's rule and a fixed ratio.

    Exit status: 0 all results are right, 1 a result is wrong, 2 the command could not run.
    """
    from .run import OffloadRequest, run

    request = OffloadRequest(
        parts=tuple(what or ()),
        shapes=tuple(shape or ()),
        layers=layers,
        tokens=tuple(tokens or ()),
        cached=(0.0, 0.5) if cached is None else tuple(cached),
        format=format,
        device=device,
        threads=threads,
        seconds=seconds,
        limit=limit,
        peers=not no_peers,
        folder=folder,
        commit=commit,
    )
    raise typer.Exit(run(request, json))
