"""`goldsmith bench`, with peers and with modules made of several operators: `python -m benchmarks.bench [WHAT...]`.

It takes the options of `goldsmith bench` and writes the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import typer

from goldsmith.cli.bench.options import bench_command
from goldsmith.cli.bench.subject import ModuleSubject, Peer
from goldsmith.cli.terminal import in_a_paragraph

from .common import options
from .modules import ALL as MODULES
from .peers import ALL as PEERS


def program(peers: Mapping[str, Peer], modules: Mapping[str, type[ModuleSubject]]) -> typer.Typer:
    """The command with these peers and modules."""
    app = options.program()
    app.command("benchmarks.bench")(in_a_paragraph(bench_command(peers, modules)))
    return app


app = program(PEERS, MODULES)

if __name__ == "__main__":
    app(prog_name="python -m benchmarks.bench")
