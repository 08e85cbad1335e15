"""The options of `goldsmith bench`; imports nothing heavy, so that --help answers at once.

benchmarks/bench.py of the repository builds the same command with peers and modules: `python -m benchmarks.bench`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from ..help_text import grouped
from ..signals import exit_on_signals
from ..terminal import in_a_paragraph, loading_torch, print_paragraph
from .moved import CHECKOUT

if TYPE_CHECKING:
    from .subject import ModuleSubject, Peer

Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: the GPU, if there is one.")]
Json = Annotated[
    str | None, typer.Option("--json", "--out", help="Append the rows as JSON lines; - is stdout.", metavar="FILE")
]
Commit = Annotated[str, typer.Option(help="Commit to record in the rows if git is not available.", show_default=False)]

GROUPS = {
    "What to time": ("what", "case", "backend", "device", "threads", "against"),
    "How": ("seconds", "no_verify", "verified"),
    "Output": ("json", "commit"),
}


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    if not any(command.name == "bench" for command in app.registered_commands):
        app.command("bench", cls=grouped(GROUPS))(in_a_paragraph(bench_command()))


def bench_command(
    peers: "Mapping[str, Peer] | None" = None, modules: "Mapping[str, type[ModuleSubject]] | None" = None
) -> Callable[..., None]:
    """The bench command: times operators, and also these peers and modules, if any are given."""
    more = f", and modules made of them: {', '.join(modules)}" if modules else ""
    what_help = f"Operators (mhc.post) or families (mhc){more}. Default: all that have benchmarks."
    against_help = f"Takes only none. To time peers, run `{CHECKOUT}` in a checkout of the repository."
    if peers:
        against_help = (
            f"Peers to time in the same run: {', '.join(peers)}, none. PEER:TEXT times the peer only where 'OP CASE "
            "threads=N' contains TEXT (a peer that tunes itself takes minutes). Default: all installed."
        )

    def bench(
        what: Annotated[list[str] | None, typer.Argument(metavar="WHAT", help=what_help, show_default=False)] = None,
        against: Annotated[list[str] | None, typer.Option(help=against_help)] = None,
        case: Annotated[list[str] | None, typer.Option(help="Time only cases whose name contains this.")] = None,
        backend: Annotated[
            str | None, typer.Option(help="Time only this backend. Default: the one that auto chooses.")
        ] = None,
        device: Device = None,
        json: Json = None,
        seconds: Annotated[float, typer.Option(help="Time budget of each timing.", min=0.01)] = 0.5,
        threads: Annotated[
            list[str] | None,
            typer.Option(
                help="Number of CPU threads. Repeat the option to time several numbers. 8:TEXT uses 8 threads only "
                "for cases whose 'OP CASE' contains TEXT. Default: torch's number.",
                metavar="N",
            ),
        ] = None,
        no_verify: Annotated[
            bool, typer.Option("--no-verify", help="Time without checking first; the rows record this.")
        ] = False,
        verified: Annotated[
            list[str] | None,
            typer.Option(
                help="Use results that `goldsmith verify --json FILE` wrote for this code on this machine.",
                metavar="FILE",
            ),
        ] = None,
        proof: Annotated[list[str] | None, typer.Option(metavar="FILE", hidden=True)] = None,
        commit: Commit = "",
    ) -> None:
        """Verify operators, then time them. Each row has the machine, versions, spread and share of the copy rate.

        In a checkout of the repository, `goldsmith bench generate --help` is about whole models.
        """
        with exit_on_signals(), loading_torch():
            from .command import run
            from .run import BenchRequest

        if proof:
            print_paragraph("DeprecationWarning: --proof is now called --verified.")
        request = BenchRequest(
            names=tuple(what or ()),
            peers=tuple(against) if against is not None else None,
            cases=tuple(case or ()),
            backend=backend,
            device=device,
            seconds=seconds,
            verify=not no_verify,
            verified_files=(*(verified or ()), *(proof or ())),
            commit=commit,
            threads=tuple(threads or ()),
        )
        raise typer.Exit(run(request, out=json, peers=peers, modules=modules))

    return bench
