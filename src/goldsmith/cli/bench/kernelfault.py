"""`goldsmith bench kernelfault`: known faults in copies of kernels, and what the assay says of them.

The faults and the script that scores them stand in benchmarks/kernelfault of a source checkout; they are not installed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..terminal import Problem, in_a_paragraph

NAME = "bench kernelfault"


class Commands(TyperGroup):
    """Takes `bench kernelfault` and `bench offload` each for one command; any other `bench` times operators."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        both = " ".join(args[:2])
        if len(args) > 1 and both in self.commands:
            args = [both, *args[2:]]
        return super().resolve_command(ctx, args)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.info.cls = Commands
    if not any(command.name == NAME for command in app.registered_commands):
        app.command(NAME)(in_a_paragraph(kernelfault))


def kernelfault(
    fault: Annotated[
        str | None, typer.Option(help="This fault only: M04, or M04b. Default: all.", metavar="ID")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Faults in this kernel only. Default: all.", metavar="HOST")] = None,
    backend: Annotated[
        str | None, typer.Option(help="Faults in this backend only: torch, triton, reference, native. Default: all.")
    ] = None,
    author: Annotated[
        str | None,
        typer.Option(help="Faults by these only: goldsmith, or stranger, who had not read the rules. Default: both."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cuda: faults of Triton kernels, compiled for the GPU. Default: cpu, interpreted."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds of every fault and case.", min=1)] = 5,
    clean: Annotated[
        int | None,
        typer.Option(
            help="Right kernels drawn at random. Default: 3000, and none where faults are narrowed down.", min=0
        ),
    ] = None,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Ask the usual rules (assert_close, gradcheck, ...), too.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="One case of every fault.")] = False,
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="Print the diagnosis of each chosen fault, and no rates.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(help="Processes at a time. Default: all cores but one.", min=1)] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="Keep rows in this file, and go on from it. Default: one in build/kernelfault.", metavar="FILE"
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures as JSON.", metavar="FILE")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML page.", metavar="FILE")] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Write the calibration of causes, from development faults alone.")
    ] = False,
) -> None:
    """Put known faults into copies of kernels, and count what the assay finds, where, and why.

    Needs a source checkout. Rows are kept as they come: the same command goes on where the last one stopped. Exit
    status: 0 every fault found and nothing right accused, 1 otherwise, 2 the command cannot be carried out.
    """
    values: dict[str, object] = {
        "fault": fault,
        "host": host,
        "backend": backend,
        "author": author,
        "device": device,
        "seeds": seeds,
        "clean": clean,
        "jobs": jobs,
    }
    values |= {"keep": keep, "json": json, "html": html}
    flags = {"baselines": baselines, "quick": quick, "diagnose": diagnose, "fit": fit}
    words = [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
    raise typer.Exit(_run(_script(), [*words, *(f"--{name}" for name, given in flags.items() if given)]))


def _script() -> Path:
    script = Path(__file__).resolve().parents[4] / "benchmarks" / "kernelfault" / "score.py"
    if not script.is_file():
        raise Problem(
            "bench kernelfault needs a source checkout of goldsmith: the faults stand in its benchmarks/kernelfault, "
            "which is not installed."
        )
    return script


def _run(script: Path, words: Sequence[str]) -> int:
    """The script's exit status; an interrupt reaches both, and the script ends by itself."""
    child = subprocess.Popen([sys.executable, str(script), *words])
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue
