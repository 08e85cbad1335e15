"""The options of `goldsmith gate`; imports nothing heavy, so that --help answers at once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..help_text import grouped, joined
from ..signals import exit_on_signals
from ..terminal import announce, in_a_paragraph, within


class SandboxChoice(StrEnum):
    auto = "auto"
    namespaces = "namespaces"


class SizesChoice(StrEnum):
    auto = "auto"
    declared = "declared"


class ProbesChoice(StrEnum):
    default = "default"
    quick = "quick"


class ResumeChoice(StrEnum):
    auto = "auto"
    never = "never"


GROUPS = {
    "What to judge": ("candidates", "problem", "sizes", "elements", "workloads", "dtype"),
    "How": ("device", "jobs", "cluster", "probes", "seed", "diagnose", "bench", "problem_seconds"),
    "What a candidate may use": ("seconds", "import_seconds", "total_seconds", "memory", "sandbox"),
    "Output": ("json", "resume", "html", "verbose"),
}


def register(app: typer.Typer) -> None:
    """Add the command to the program, once."""
    if not any(command.name == "gate" for command in app.registered_commands):
        app.command("gate", cls=grouped(GROUPS), help=joined(gate.__doc__ or ""))(in_a_paragraph(gate))


def gate(
    candidates: Annotated[
        list[Path],
        typer.Argument(
            metavar="CANDIDATES",
            help="Files and folders: Python or Triton (.py), CUDA C++ (.cu), C++ (.cpp), JSON lines with a source, "
            "FlashInfer-Bench solutions (.json).",
            show_default=False,
        ),
    ],
    problem: Annotated[
        list[str] | None,
        typer.Option(
            help="A Python file with golden and cases, a KernelBench file, a FlashInfer-Bench definition, or a folder "
            "of them: each candidate then names its own, by the key problem of its JSON line, or by PROBLEM = 'NAME' "
            "in its Python file. Default: each candidate's file has its golden and cases.",
            metavar="PATH",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: the GPU, if there is one.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="KernelBench: dtype of inputs and weights. Repeat it for several.")
    ] = None,
    sizes: Annotated[
        SizesChoice,
        typer.Option(help="KernelBench: auto halves sizes that are too large to judge; declared keeps them."),
    ] = SizesChoice.auto,
    elements: Annotated[
        int | None,
        typer.Option(help="KernelBench: most elements of inputs and weights. Default: 4096; on a GPU 1048576.", min=1),
    ] = None,
    workloads: Annotated[
        Path | None,
        typer.Option(help="FlashInfer-Bench: workloads, if they are not in the definition's data set.", metavar="FILE"),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Judges that work at the same time. Default: one per core, at most 8.", min=1)
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Judge on this Ray cluster; auto finds it, local starts one here.", metavar="ADDRESS"),
    ] = None,
    probes: Annotated[
        ProbesChoice, typer.Option(help="Which probes run: quick leaves out layouts, scaling and taint.")
    ] = ProbesChoice.default,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the inputs. Default: one that no candidate can know.")
    ] = None,
    diagnose: Annotated[bool, typer.Option("--diagnose", help="Diagnose the candidates that fail.")] = False,
    bench: Annotated[bool, typer.Option("--bench", help="Time what is accepted, and verify the timed calls.")] = False,
    seconds: Annotated[float, typer.Option(help="Time limit of one call, in seconds.", callback=within(0.01))] = 60.0,
    import_seconds: Annotated[
        float, typer.Option(help="Time limit of the import, in seconds, with compilation.", callback=within(0.01))
    ] = 60.0,
    total_seconds: Annotated[
        float,
        typer.Option(
            help="Time limit of all imports and calls of a candidate together, in seconds.", callback=within(0.01)
        ),
    ] = 300.0,
    problem_seconds: Annotated[
        float,
        typer.Option(
            help="Time limit of one step of the problem's own code, in seconds: reading its file, drawing the inputs "
            "of a case, or one call of its golden.",
            callback=within(0.01),
        ),
    ] = 300.0,
    memory: Annotated[
        float,
        typer.Option(
            help="Memory limit of a candidate, in GiB, on top of what its process has at the start.",
            callback=within(0.001, 1e6),
        ),
    ] = 4.0,
    sandbox: Annotated[
        SandboxChoice,
        typer.Option(help="namespaces: refuse to run without them; auto: namespaces where the system allows them."),
    ] = SandboxChoice.auto,
    json: Annotated[
        str | None, typer.Option(help="Write one JSON line for each candidate; - means stdout.", metavar="FILE")
    ] = None,
    resume: Annotated[
        ResumeChoice,
        typer.Option(
            help="auto: keep the verdicts in the file of --json on what has not changed since, and judge the rest; "
            "never: judge all."
        ),
    ] = ResumeChoice.auto,
    html: Annotated[Path | None, typer.Option(help="Write the verdicts to one HTML page.", metavar="FILE")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show all evidence, not only the first sentence.")
    ] = False,
) -> None:
    """Judge kernels that nobody trusts: each in a process of its own, with limits, against a float64 golden.

    After Ctrl-C or kill -9 the same command with --json FILE judges only the rest.

    A verdict is one of: accepted, wrong, cheating, crashed, timed_out, over_memory, refused.

    Exit status: 0 all accepted, 1 some not, 2 the command could not run, or some could not be judged because of the
    problem or the judge (the reasons problem, reference_fault and judge), 130 interrupted.
    """
    if problem and len(problem) > 1:
        text = "it was given twice. For several problems, give a folder of them; each candidate then names its own"
        raise typer.BadParameter(text, param_hint="'--problem'")
    announce("Loading the judge")
    with exit_on_signals():
        from .command import GateRequest, run

    request = GateRequest(
        candidates=tuple(candidates),
        problem=problem[0] if problem else None,
        device=device,
        dtypes=tuple(dtype or ()),
        sizes=sizes.value,
        elements=elements,
        workloads=workloads,
        jobs=jobs,
        cluster=cluster,
        probes=probes.value,
        seed=seed,
        resume=resume is ResumeChoice.auto,
        diagnose=diagnose,
        bench=bench,
        seconds=seconds,
        import_seconds=import_seconds,
        total_seconds=total_seconds,
        problem_seconds=problem_seconds,
        memory=memory,
        sandbox=sandbox.value,
        verbose=verbose,
    )
    raise typer.Exit(run(request, json_to=json, html=html))
