"""`goldsmith bench`: chooses operators, sizes and peers, writes rows to a file as they come, and shows tables."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from ...core.bench import BenchCase
from ...core.device import machine
from ...core.op import Op
from ..targets import operators
from ..terminal import Failure, console, duration
from . import tables, verified_files
from .experts import MoeInt8Subject, MoeSubject, SlotsSubject
from .moved import CHECKOUT, PEERS_ELSEWHERE
from .rows import TimingRow
from .run import Bench, BenchRequest
from .session import Session, device_name, session
from .subject import ModuleSubject, Peer, Subject
from .timing import clock
from .verifier import Verifier

CPU_ELEMENTS = 2**20  # larger cases run on a CPU only when --case names them
NO_PEER = "none"  # --against none
SUBJECTS: dict[str, type[Subject]] = {
    "experts.moe": MoeSubject,
    "experts.moe_int8": MoeInt8Subject,
    "experts.slots": SlotsSubject,
}


def run(
    request: BenchRequest, *, out: str | None = None, peers: Mapping[str, Peer] | None = None,
    modules: Mapping[str, type[ModuleSubject]] | None = None,
) -> int:  # fmt: skip
    """Time operators and these modules, and compare them with these peers; returns the exit status."""
    err, peers, modules = console(stderr=True), peers or {}, modules or {}
    device, names = _device_and_names(request, _names(request, modules), err)
    if machine().interpreter:
        raise Failure("TRITON_INTERPRET is set: the interpreter's times say nothing about a GPU. Unset it for bench.")
    for option in request.threads:
        count = option.partition(":")[0]
        if not (count.isascii() and count.isdigit() and int(count)):
            raise Failure(f"--threads {option}: expected a whole number of at least 1, such as 8 or 8:TEXT.")
    subjects = list(_subjects(request, names, device, modules))
    chosen = _chosen_peers(request, peers, err)
    verifier = Verifier(request.verify, device, err, verified_files.read(request.verified_files, device))
    with session(device, out, request.commit) as current:
        screen = _Tables(current)
        try:
            verifier.verify_all(
                [(s.op, s.entry.dtype) for s in subjects if s.op is not None], request.backend or "auto"
            )
            bench = Bench(request, current.conditions, clock(device), chosen, verifier, err)
            for row in bench.run(_makers(subjects, device, err)):
                screen.add(row)
                current.write([row])
        finally:
            screen.show()
    status = current.end(tables.legend(current.conditions.device))
    for line in verifier.rejections():
        current.stream.print(line, soft_wrap=True)
    return 1 if verifier.rejected else status


@dataclass(frozen=True)
class _TimingJob:
    """A benchmark case and how to make its subject; `op` is None for a module of several operators."""

    name: str
    entry: BenchCase
    make: Callable[[BenchCase, str], Subject]
    op: Op | None


class _Tables:
    """A table per case, printed when its last row has arrived."""

    def __init__(self, current: Session) -> None:
        self.session, self.pending = current, list[TimingRow]()

    def add(self, row: TimingRow) -> None:
        if self.pending and _table_key(self.pending[0]) != _table_key(row):
            self.show()
        self.pending.append(row)

    def show(self) -> None:
        if self.pending:
            self.session.stream.print(tables.table(self.pending))
            for row in self.pending:
                if row.median_us is None:
                    self.session.stream.print(tables.broken(row))
            self.session.shown += len(self.pending)
            self.pending = []


def _table_key(row: TimingRow) -> tuple[str, str, int | None]:
    return row.op, row.case, row.threads


def _makers(subjects: list[_TimingJob], device: str, err: Console) -> Iterator[Callable[[], Subject]]:
    """A maker per subject; a line on stderr announces each one, with the estimated time left."""
    began = time.monotonic()
    for k, job in enumerate(subjects):
        left = (time.monotonic() - began) / k * (len(subjects) - k) if k else 0
        more = f", about {duration(left)} left" if k else ""
        err.print(f"[dim]{k + 1} of {len(subjects)}{more}: {job.name} {job.entry.name}[/]")
        yield partial(job.make, job.entry, device)


def _cases(modules: Mapping[str, type[ModuleSubject]]) -> dict[str, Sequence[BenchCase]]:
    """The benchmark cases of every operator and module, by name."""
    return {
        **{name: op.bench for name, op in sorted(Op.all().items())},
        **{name: module.entries() for name, module in modules.items()},
    }


def _names(request: BenchRequest, modules: Mapping[str, type[ModuleSubject]]) -> list[str]:
    """The operators and modules on the command line; all of them if it names none."""
    cases_of = _cases(modules)
    selected = list(cases_of)
    if request.names:
        selected = []
        for name in request.names:
            members = [k for k in cases_of if k == name or k.startswith(name + ".")]
            if not members:
                more = f"modules: {', '.join(modules)}" if modules else f"modules of several operators: {CHECKOUT}"
                raise Failure(f"no operator {name!r}; there are: {operators()}; {more}.")
            selected += members
    return list(dict.fromkeys(selected))


def _subjects(
    request: BenchRequest, selected: list[str], device: str, modules: Mapping[str, type[ModuleSubject]]
) -> Iterator[_TimingJob]:
    ops, cases_of = Op.all(), _cases(modules)
    any_chosen = False
    for name in selected:
        for entry in cases_of[name]:
            chosen_by_name = any(part in entry.name for part in request.cases)
            if request.cases and not chosen_by_name:
                continue
            if not chosen_by_name and not device.startswith("cuda") and not _is_small_enough_for_a_cpu(entry):
                continue
            any_chosen = True
            module = modules.get(name)
            make = module if module is not None else partial(SUBJECTS.get(name, Subject), ops[name])
            yield _TimingJob(name, entry, make, None if module is not None else ops[name])
    if not any_chosen:
        cases = sorted({e.name for name in selected for e in cases_of[name]})
        why = " that is small enough for a CPU"
        if request.cases:
            why = f" whose name contains {' or '.join(request.cases)}"
        raise Failure(f"no benchmark case{why}; available: {', '.join(cases) or 'none'}.")


def _is_small_enough_for_a_cpu(entry: BenchCase) -> bool:
    if entry.on_cpu is not None:
        return entry.on_cpu
    return math.prod(v for v in entry.sizes.values() if isinstance(v, int)) <= CPU_ELEMENTS


def _chosen_peers(request: BenchRequest, peers: Mapping[str, Peer], err: Console) -> dict[str, Peer]:
    requested = None if request.peers is None else [peer.partition(":")[0] for peer in request.peers]
    unknown = [name for name in requested or () if name not in (*peers, NO_PEER)]
    if not peers:
        if unknown:
            raise Failure(f"--against {unknown[0]}: an installed goldsmith has no peers. {PEERS_ELSEWHERE}")
        if requested is None:
            err.print(f"[dim]{PEERS_ELSEWHERE}[/]")
        return {}
    if unknown:
        raise Failure(f"no peer {unknown[0]!r}; there are: {', '.join(peers)}, and {NO_PEER}.")
    chosen: dict[str, Peer] = {}
    for name in peers if requested is None else [name for name in dict.fromkeys(requested) if name != NO_PEER]:
        reason = peers[name].missing()
        if reason is None:
            chosen[name] = peers[name]
        elif requested is not None:
            raise Failure(f"--against {name}: {reason}.")
        else:
            err.print(f"[dim]peer {name} is left out: {reason}[/]")
    return chosen


def _device_and_names(request: BenchRequest, names: list[str], err: Console) -> tuple[str, list[str]]:
    """The device, and the names to time on it.

    If a GPU is the default device, operators with kernels for CPUs are left out, because on the GPU their reference
    would be timed. If only such operators are named, they are timed on the CPU.
    """
    device = device_name(request.device)
    if request.device is not None or request.backend not in (None, "auto", "native") or device == "cpu":
        return device, names
    ops = Op.all()
    on_cpu = [name for name in names if name in ops and next(iter(ops[name].backends), None) == "native"]
    if not on_cpu:
        return device, names
    if on_cpu == names:
        err.print(
            f"[dim]{', '.join(names)}: timed on the CPU, because these kernels are for CPUs; "
            "--device cuda times the GPU.[/]"
        )
        return "cpu", names
    err.print(
        f"[dim]left out: {', '.join(on_cpu)}, which are for CPUs. To time them, name no others, or pass --device.[/]"
    )
    return device, [name for name in names if name not in on_cpu]
