"""The commands and their options. Commands import their code when they run, so that `--help` answers at once."""

from __future__ import annotations

import atexit
import gc
import os
import resource
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from .help_text import grouped
from .signals import exit_on_signals
from .terminal import Failure, in_a_paragraph, loading_torch, within

TORCH_BYTES = 1 << 30  # of address space


class Program(typer.Typer):
    """The program as a shell calls it: Ctrl-C before a command runs exits with status 130, without a traceback."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        atexit.register(gc.freeze)  # else the interpreter's end searches torch and transformers for garbage: 1 s
        try:
            return super().__call__(*args, **kwargs)
        except KeyboardInterrupt:
            raise SystemExit(130) from None


app = Program(
    name="goldsmith",
    help="Check PyTorch and Triton kernels, train and run mixture-of-experts models, or use checked operators.",
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


Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: the GPU, if there is one.")]


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"goldsmith {__version__}")
        raise typer.Exit


@app.callback()
@in_a_paragraph
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Check PyTorch and Triton kernels, train and run mixture-of-experts models, or use checked operators."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    if allowed != resource.RLIM_INFINITY and allowed < TORCH_BYTES:  # its OpenBLAS would ask for memory for ever
        text = f"this process may use {allowed >> 20} MiB of address space (ulimit -v), and torch alone needs "
        raise Failure(f"{text}{TORCH_BYTES >> 20} MiB.")
    if "GOLDSMITH_ISA" in os.environ:
        from ..core import native

        try:
            native.requested_level()
        except ValueError as error:
            raise Failure(str(error)) from None


VERIFY = {
    "What to check": ("what", "backend", "device", "dtype", "interpret", "seed"),
    "How much": ("quick", "thorough", "jobs"),
    "On several ranks": ("ranks", "limit"),
    "Output": ("verbose", "html", "json"),
}
DIAGNOSE = {
    "What to diagnose": ("target", "backend", "case", "dtype", "device", "interpret", "seed", "replay"),
    "How long": ("budget", "limit", "patch", "propose"),
    "Output": ("out", "apply", "html", "json"),
}
REPLAY = {
    "What to run": ("bundle", "target", "device"),
    "How long": ("budget",),
    "Output": ("html", "json"),
}


@app.command(cls=grouped(VERIFY))
@in_a_paragraph
def verify(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT",
            help="Operators (mhc.post), families (mhc), or targets of your own: path/to/file.py:target, module:target, "
            "or a file or module alone for all of its targets. Default: every operator.",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Check only this backend. Default: all.")] = None,
    device: Device = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Check only in this dtype. Default: all that apply.")] = None,
    interpret: Annotated[
        bool, typer.Option("--interpret", help="Run Triton kernels on the CPU, in Triton's interpreter.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write the report to one HTML page.", metavar="FILE")] = None,
    json: Annotated[str | None, typer.Option(help="Write all results as JSON; - means stdout.", metavar="FILE")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run one small case per operator and backend.")] = False,
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough",
            help="Run every case in every dtype with every probe. Large cases have every probe in two dtypes only, and "
            "on a GPU the reference in one.",
        ),
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(help="Number of worker processes. Default: depends on cores and device.", min=1)
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Run on this many processes, and judge them together: operators on DTensors, and targets that are an "
            "assay.ranks.RankTarget. Default under torchrun: all of its processes.",
            min=1,
            metavar="N",
        ),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which a rank that does not answer, a call of a kernel of yours, or a step of its file "
            "(its import, a case, a call of its golden) is reported. Default: 120; for steps of the file 300.",
            callback=within(1.0),
            metavar="X",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every finding and every note.")] = False,
) -> None:
    """Check operators and backends against their float64 references.

    Exit status: 0 everything passed, 1 something is wrong, 2 the command could not run, 130 interrupted.
    """
    if quick and thorough:
        raise Failure("--quick and --thorough exclude each other; give one of them, or neither for the ordinary run.")
    with exit_on_signals(), loading_torch():
        from .verify.command import VerifyRequest, run
        from .verify.launcher import serves_rank_0, started_ranks

    ranks = started_ranks(ranks)
    if serves_rank_0(device, limit or 120.0):
        raise typer.Exit(0)
    request = VerifyRequest(
        names=tuple(what or ()),
        backend=backend,
        device=device,
        dtype=dtype.value if dtype else None,
        interpret=interpret,
        size="quick" if quick else "thorough" if thorough else "default",
        jobs=jobs,
        seed=seed,
        verbose=verbose,
        ranks=ranks,
        limit=limit or 120.0,
        step_limit=limit or 300.0,
    )
    raise typer.Exit(run(request, html=html, json_to=json))


Html = Annotated[Path | None, typer.Option("--html", help="Write the result to one HTML page.", metavar="FILE")]
Json = Annotated[str | None, typer.Option("--json", help="Write the result as JSON; - means stdout.", metavar="FILE")]


@app.command(cls=grouped(DIAGNOSE))
@in_a_paragraph
def diagnose(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="An operator (mhc.post), or a target of your own: path/to/file.py:target or module:target. A file or "
            "module alone will do if it has one target.",
        ),
    ],
    backend: Annotated[
        str | None, typer.Option(help="Backend of an operator. Default: the first that runs here.")
    ] = None,
    case: Annotated[str | None, typer.Option(help="Run only this case. Default: try cases until one fails.")] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Draw inputs in this dtype. Default: every dtype that the target declares.")
    ] = None,
    device: Device = None,
    interpret: Annotated[
        bool, typer.Option("--interpret", help="Run Triton kernels on the CPU, in Triton's interpreter.")
    ] = False,
    budget: Annotated[float, typer.Option(help="Time limit in seconds.", callback=within(0.1))] = 60.0,
    limit: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which a call of a kernel of yours, or a step of its file (its import, a case, a call "
            "of its golden) is reported. Default: what --budget leaves; for steps of the file 300.",
            callback=within(1.0),
            metavar="X",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Save the smallest failing case and an HTML page in this folder.", metavar="DIR")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Diagnose the case saved in this bundle.", metavar="BUNDLE")
    ] = None,
    patch: Annotated[
        bool,
        typer.Option(
            "--patch/--no-patch",
            help="Look for an edit of the candidate's source that makes it pass, for 50 to 70 % of the time limit.",
        ),
    ] = True,
    apply: Annotated[
        Path | None,
        typer.Option(help="Write a copy of the candidate's file with the patch. Your own file stays.", metavar="FILE"),
    ] = None,
    propose: Annotated[
        str | None,
        typer.Option(
            help="A program that gets the evidence and the source as JSON on its standard input, and returns patches. "
            "They run in a sandbox, and only those that pass everything are shown.",
            metavar="COMMAND",
        ),
    ] = None,
    html: Html = None,
    json: Json = None,
) -> None:
    """Find the first wrong stage of a kernel and its cause: ranked causes, evidence, the smallest failing case.

    Exit status: 0 nothing is wrong, 1 something is wrong, 2 the command could not run, 130 interrupted.
    """
    with exit_on_signals(), loading_torch():
        from .diagnose.command import DiagnoseRequest, run

    request = DiagnoseRequest(
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
        patch=patch,
        apply=None if apply is None else str(apply),
        propose=propose,
        limit=limit,
    )
    raise typer.Exit(run(request, json))


@app.command(cls=grouped(REPLAY))
@in_a_paragraph
def replay(
    bundle: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="A folder with a failing case, saved by diagnose or a test.")
    ],
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="The operator or target, as for diagnose. Default: the operator that the bundle names.",
        ),
    ] = None,
    device: Device = None,
    budget: Annotated[
        float,
        typer.Option(
            help="Time limit in seconds for the kernel's first run; later runs get a third of it.", callback=within(0.1)
        ),
    ] = 60.0,
    html: Html = None,
    json: Json = None,
) -> None:
    """Run the inputs of a bundle again and report whether they still fail. A run that hangs is stopped.

    Exit status: 0 nothing is wrong, 1 something is wrong, 2 the command could not run, 130 interrupted.
    """
    with exit_on_signals(), loading_torch():
        from .diagnose.command import DiagnoseRequest, run

    request = DiagnoseRequest(
        "replay",
        target or "",
        device=device,
        budget=budget,
        bundle=str(bundle),
        html=None if html is None else str(html),
        json=json is not None,
    )
    raise typer.Exit(run(request, json))


@app.command(cls=grouped({"What to write": ("name", "torch"), "Output": ("json",)}))
@in_a_paragraph
def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the kernel, and of its file; may begin with a folder.")
    ],
    torch: Annotated[
        bool, typer.Option("--torch", help="Write the kernel in plain torch. Default: in Triton, if it is installed.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the files as JSON.")] = False,
) -> None:
    """Write NAME.py with a kernel, its golden and its cases, and test_NAME.py for pytest. Both pass as written.

    It never overwrites a file.
    """
    with exit_on_signals():
        from .new.command import run

    raise typer.Exit(run(name, plain=torch, as_json=json))


@app.command(cls=grouped({"Output": ("json",)}))
@in_a_paragraph
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what this machine has, which backends run on it, and why the others do not."""
    with exit_on_signals(), loading_torch():
        from .doctor import run

    run(as_json=json)
