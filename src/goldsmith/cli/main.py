"""The commands and their options. Heavy things are imported when a command runs, so that `--help` answers at once."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from .say import Problem, in_a_paragraph


class Program(typer.Typer):
    """The commands as they are called from a shell: Ctrl-C while they are put together is no traceback either."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except KeyboardInterrupt:
            raise SystemExit(130) from None


app = Program(
    name="goldsmith",
    help="Operators for mixture-of-experts and hyper-connected transformers, each with its proof.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: the GPU when there is one.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"goldsmith {__version__}")
        raise typer.Exit


@app.callback()
@in_a_paragraph
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Operators for mixture-of-experts and hyper-connected transformers, each with its proof."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    if "GOLDSMITH_ISA" in os.environ:
        from ..core import native

        try:
            native.asked_level()
        except ValueError as error:
            raise Problem(str(error)) from None


@app.command()
@in_a_paragraph
def verify(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT",
            help="Operators (mhc.post), families (mhc), or assay targets of your own. Default: every operator.",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Prove this backend only. Default: all.")] = None,
    device: Device = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Prove in this dtype only. Default: all that apply.")] = None,
    interpret: Annotated[
        bool, typer.Option("--interpret", help="Run Triton kernels through its interpreter, on the CPU.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML page.", metavar="FILE")] = None,
    json: Annotated[str | None, typer.Option(help="Write all results as JSON; - is stdout.", metavar="FILE")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One small case for every operator and backend.")] = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Every case, the largest too, in every dtype, through every probe.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(help="Worker processes. Default: by cores and device.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
) -> None:
    """Prove operators and backends against their float64 references.

    Exit status: 0 all hold, 1 something is wrong, 2 the command cannot be carried out.
    """
    if quick and thorough:
        raise Problem("--quick and --thorough exclude one another; choose one, or neither for the ordinary run.")
    from .verify.command import Request, run

    request = Request(
        names=tuple(what or ()),
        backend=backend,
        device=device,
        dtype=dtype.value if dtype else None,
        interpret=interpret,
        size="quick" if quick else "thorough" if thorough else "default",
        jobs=jobs,
        seed=seed,
    )
    raise typer.Exit(run(request, html=html, json_to=json))


Html = Annotated[Path | None, typer.Option("--html", help="Write one HTML page.", metavar="FILE")]
Json = Annotated[str | None, typer.Option("--json", help="Write everything as JSON; - is stdout.", metavar="FILE")]


@app.command()
@in_a_paragraph
def diagnose(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="An operator (mhc.post), or a target of your own: package.module:target."
        ),
    ],
    backend: Annotated[str | None, typer.Option(help="Of an operator. Default: the first that can run here.")] = None,
    case: Annotated[str | None, typer.Option(help="Only this case. Default: cases are tried until one fails.")] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Draw inputs in this dtype. Default: each that is declared.")
    ] = None,
    device: Device = None,
    interpret: Annotated[
        bool, typer.Option("--interpret", help="Run Triton kernels through its interpreter, on the CPU.")
    ] = False,
    budget: Annotated[float, typer.Option(help="Seconds in all.", min=0.1)] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Keep the smallest failing case here, with a page.", metavar="DIR")
    ] = None,
    replay: Annotated[Path | None, typer.Option(help="Diagnose the case of this bundle.", metavar="BUNDLE")] = None,
    html: Html = None,
    json: Json = None,
) -> None:
    """Say which stage goes wrong first, and why: ranked causes with their evidence, and the smallest failing case.

    Exit status: 0 nothing is wrong, 1 something is, 2 the command cannot be carried out.
    """
    from .diagnose.command import Request, run

    request = Request(
        "diagnose",
        target,
        backend=backend,
        case=case,
        dtype=dtype.value if dtype else None,
        device=device,
        interpret=interpret,
        budget=budget,
        seed=seed,
        out=None if out is None else str(out),
        bundle=None if replay is None else str(replay),
        html=None if html is None else str(html),
        json=json is not None,
    )
    raise typer.Exit(run(request, json))


@app.command()
@in_a_paragraph
def replay(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder that diagnose or a test has left.")],
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="package.module:target. Default: the operator that it names.")
    ] = None,
    device: Device = None,
    budget: Annotated[
        float, typer.Option(help="Seconds for the first run of the kernel, a third for any other.", min=0.1)
    ] = 60.0,
    html: Html = None,
    json: Json = None,
) -> None:
    """Run a bundle's inputs once more, and say whether they fail as they did. A run that does not end is ended.

    Exit status: 0 nothing is wrong here, 1 something is, 2 the command cannot be carried out.
    """
    from .diagnose.command import Request, run

    request = Request(
        "replay",
        target or "",
        device=device,
        budget=budget,
        bundle=str(bundle),
        html=None if html is None else str(html),
        json=json is not None,
    )
    raise typer.Exit(run(request, json))


@app.command()
@in_a_paragraph
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what this machine has, which backends run here, and why the others do not."""
    from .doctor import run

    run(as_json=json)
