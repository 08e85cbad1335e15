"""`goldsmith bench`: which operators, sizes and peers; rows to a file as they come, tables to the screen."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console

from ...core.device import machine
from ...core.op import Op
from ..say import Problem, console
from . import show
from .composites import ALL as COMPOSITES
from .peers import ALL as PEERS
from .prove import Prover
from .rows import Conditions, Row
from .run import Bench, Request
from .subject import Subject
from .timing import clock

CPU_ELEMENTS = 2**20  # larger cases on a CPU only when named
INTERRUPTED = 130


def run(request: Request, *, out: str | None = None) -> int:
    """The whole command; returns the exit status."""
    err = console(stderr=True)
    device = _device(request.device)
    if machine().interpreter:
        raise Problem("TRITON_INTERPRET is set: times of Triton's interpreter mean nothing. Unset it for bench.")
    subjects = list(_subjects(request, device))
    peers = _peers(request, err)
    conditions = Conditions.here(device)
    prover = Prover(request.verify, err)
    bench = Bench(request, conditions, clock(device), peers, prover, err)
    target = _open(out)
    stream = console() if out != "-" else err
    status = 0
    stream.print(f"[dim]{conditions}[/]")
    last: tuple[str, str] | None = None
    pending: list[Row] = []
    try:
        for row in bench.run(_made(subjects, device)):
            if target is not None:
                target.write(json.dumps(row.to_json()) + "\n")
                target.flush()
            key = (row.op, row.case)
            if last not in (None, key):
                stream.print(show.table(pending))
                pending = []
            pending.append(row)
            if row.median_us is None:
                err.print(show.broken(row))
            last = key
    except KeyboardInterrupt:
        err.print("[yellow]Interrupted: the rows so far are kept.[/]")
        status = INTERRUPTED
    finally:
        if target is not None and target is not sys.stdout:
            target.close()
    if pending:
        stream.print(show.table(pending))
    stream.print(show.legend(conditions.device))
    if prover.rejected:
        return 1
    return status or (0 if bench.rows else 2)


def _made(subjects: list[tuple[Any, Any]], device: str) -> Iterator[Subject]:
    """Inputs are drawn one case at a time: two large ones need not fit the card together."""
    for make, entry in subjects:
        yield make(entry, device)
        if device.startswith("cuda"):
            torch.cuda.empty_cache()


def _subjects(request: Request, device: str) -> Iterator[tuple[Any, Any]]:
    ops = dict(sorted(Op.all().items()))
    known = {**{name: op.bench for name, op in ops.items()}, **{n: c.entries() for n, c in COMPOSITES.items()}}
    wanted = list(known)
    if request.names:
        wanted = []
        for name in request.names:
            members = [k for k in known if k == name or k.startswith(name + ".")]
            if not members:
                raise Problem(f"no operator {name!r}; there are: {', '.join(known)}.")
            wanted += members
    found = False
    for name in dict.fromkeys(wanted):
        for entry in known[name]:
            named = any(part in entry.name for part in request.cases)
            if request.cases and not named:
                continue
            if not named and not device.startswith("cuda") and _elements(entry) > CPU_ELEMENTS:
                continue
            found = True
            yield (COMPOSITES[name] if name in COMPOSITES else _maker(ops[name])), entry
    if not found:
        cases = sorted({e.name for name in wanted for e in known[name]})
        why = (
            f" whose name contains {' or '.join(request.cases)}" if request.cases else " that is small enough for a CPU"
        )
        raise Problem(f"no benchmark case{why}; there are: {', '.join(cases) or 'none'}.")


def _maker(op: Op) -> Any:
    return lambda entry, device: Subject(op, entry, device)


def _elements(entry: Any) -> int:
    return math.prod(v for v in entry.sizes.values() if isinstance(v, int))


def _peers(request: Request, err: Console) -> dict[str, Any]:
    unknown = [name for name in request.peers or () if name not in PEERS]
    if unknown:
        raise Problem(f"no peer {unknown[0]!r}; there are: {', '.join(PEERS)}.")
    chosen = {}
    for name in request.peers if request.peers is not None else PEERS:
        reason = PEERS[name].missing()
        if reason is None:
            chosen[name] = PEERS[name]
        elif request.peers is not None:
            raise Problem(f"--against {name}: {reason}.")
        else:
            err.print(f"[dim]peer {name} is left out: {reason}[/]")
    return chosen


def _device(wanted: str | None) -> str:
    if wanted is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = wanted.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise Problem(f"{wanted!r} is no device; use cpu, cuda or cuda:1.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise Problem(f"--device {wanted}: this machine has no CUDA device that torch can use.")
    return wanted


def _open(out: str | None) -> IO[str] | None:
    if out is None:
        return None
    if out == "-":
        return sys.stdout
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        return open(out, "a", encoding="utf-8")
    except OSError as error:
        raise Problem(f"cannot write {out}: {error.strerror or error}.") from error
