"""One run: verifies each subject, warms it up, times it beside its peers, and makes rows."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from rich.console import Console

from ...core.device import BackendUnavailable
from .ceilings import Ceiling, Ceilings
from .rows import NOT_TIMED, Conditions, Figures, TimingRow, timed
from .subject import OURS, Peer, Subject, Variant
from .timing import FLUSH_BYTES, Call, CpuClock, CudaClock, Timing
from .verifier import Verdict, Verifier, golden_result, relative_error

GRAPH_CALLS = 20


def in_rotation(calls: list[Call]) -> Call:
    """A call that makes the next of these calls each time, and starts over after the last."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


@dataclass(frozen=True)
class BenchRequest:
    """The options of the command line."""

    names: tuple[str, ...] = ()
    peers: tuple[str, ...] | None = None  # PEER, or PEER:TEXT for subjects "OP CASE threads=N" that contain the text
    cases: tuple[str, ...] = ()
    backend: str | None = None
    device: str | None = None
    seconds: float = 0.5
    verify: bool = True
    verified_files: tuple[str, ...] = ()  # files of `goldsmith verify --json`
    commit: str = ""
    threads: tuple[str, ...] = ()  # N, or N:TEXT for subjects "OP CASE" that contain the text; (): torch's count

    def against(self, peer: str, subject: str) -> bool:
        """Whether to time this peer beside the subject "OP CASE threads=N"."""
        texts = [wanted.partition(":")[2] for wanted in self.peers or () if wanted.partition(":")[0] == peer]
        return not texts or any(text in subject for text in texts)

    def thread_counts(self, subject: str) -> list[int]:
        """The thread counts for the subject "OP CASE"; empty where all of them are for other subjects."""
        requests = [wanted.partition(":") for wanted in self.threads]
        counts = [int(count) for count, _, text in requests if text in subject]
        return list(dict.fromkeys(counts)) if requests else [torch.get_num_threads()]


@dataclass
class Bench:
    """One run: its clock, peers and checks, and the rows so far."""

    request: BenchRequest
    conditions: Conditions
    clock: CudaClock | CpuClock
    peers: dict[str, Peer]
    verifier: Verifier
    say: Console
    rows: list[TimingRow] = field(default_factory=list)
    ceilings: Ceilings = field(init=False)

    def __post_init__(self) -> None:
        self.ceilings = Ceilings(self.clock)

    def run(self, makers: Iterable[Callable[[], Subject]]) -> Iterator[TimingRow]:
        """Rows of all subjects, made one at a time: two large subjects may not fit the GPU together."""
        for make in makers:
            subject = make()
            for threads in self._thread_counts(subject):
                for row in self._subject(subject, threads):
                    self.rows.append(row)
                    yield row
            del subject
            gc.collect()  # graphs and their results refer to each other
            if isinstance(self.clock, CudaClock):
                torch.cuda.empty_cache()

    def _thread_counts(self, subject: Subject) -> Iterator[int | None]:
        """Each thread count, set in torch (and so in our pool) while it is used; None on a GPU."""
        if isinstance(self.clock, CudaClock):
            yield None
            return
        before = torch.get_num_threads()
        try:
            for threads in self.request.thread_counts(f"{subject.name} {subject.entry.name}"):
                torch.set_num_threads(threads)
                yield threads
        finally:
            torch.set_num_threads(before)

    def _subject(self, subject: Subject, threads: int | None) -> Iterator[TimingRow]:
        try:
            backend = subject.choose(self.request.backend or "auto")
        except BackendUnavailable as error:
            self.say.print(f"[dim]{subject.name} {subject.entry.name}: {error}[/]")
            return
        verdict = self.verifier.verdict(subject, backend)
        if verdict[0] is False:
            return  # the verifier keeps the reason
        ceiling = self.ceilings.of(subject, threads)
        usable: list[Variant] = []
        for name, make in self._makers(subject, backend, threads).items():
            variant, broken = self._ready(subject, name, make)
            if variant is not None:
                usable.append(variant)
            elif name == OURS:
                self.verifier.reject(subject, backend, f"{subject.entry.name}: {broken}")
                return
            elif broken:
                stand_in = Variant(name, lambda: (), [], note=f"did not run: {broken}")
                yield self._row(subject, stand_in, verdict, None, "forward", "", NOT_TIMED, ceiling, threads)
        errors = self._errors(subject, usable)
        again = partial(self._again, subject, backend, threads, [variant.peer for variant in usable])
        for direction, mode, divide, timings in self._timings(subject, usable, again):
            entry, forward = subject.entry, direction == "forward"
            moved = entry.forward_bytes if forward else entry.backward_bytes
            flop = entry.forward_flop if forward else entry.backward_flop
            for variant in usable:
                if variant.peer in timings:
                    figures = timed(timings[variant.peer], moved, ceiling, divide, flop)
                    off = errors[variant.peer]
                    yield self._row(subject, variant, verdict, off, direction, mode, figures, ceiling, threads)

    def _errors(self, subject: Subject, variants: list[Variant]) -> dict[str, float | None]:
        golden, errors = golden_result(subject), dict[str, float | None]()
        with torch.set_grad_enabled(not subject.decoding):
            for variant in variants:
                subject.rewind()
                errors[variant.peer] = relative_error(golden, variant)
        return errors

    def _makers(self, subject: Subject, backend: str, threads: int | None) -> dict[str, Callable[[], Variant | None]]:
        makers: dict[str, Callable[[], Variant | None]] = {OURS: lambda: subject.ours(backend)}
        for name, peer in self.peers.items():
            if self.request.against(name, f"{subject.name} {subject.entry.name} threads={threads}"):
                makers[name] = partial(peer.prepare, subject)
        return makers

    def _ready(
        self, subject: Subject, name: str, make: Callable[[], Variant | None]
    ) -> tuple[Variant | None, str | None]:
        """The variant, compiled and warm, or the reason why it fails; a failure at one size does not end the run."""
        try:
            with self.say.status(f"[dim]warming up {name} for {subject.name} {subject.entry.name}[/]"):
                variant = make()
                if variant is None:
                    return None, None  # the peer does not offer this operator
                with torch.set_grad_enabled(not subject.decoding):
                    for _ in range(3 if isinstance(self.clock, CudaClock) else 1):
                        variant.results()
                    if subject.timed_backward:
                        variant.backward()()
                if isinstance(self.clock, CudaClock):
                    torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  whatever a variant raises becomes its note
            return None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        return variant, None

    def _row(
        self,
        subject: Subject,
        variant: Variant,
        verdict: Verdict,
        error: float | None,
        direction: str,
        mode: str,
        figures: Figures,
        ceiling: Ceiling,
        threads: int | None,
    ) -> TimingRow:
        is_ours = variant.peer == OURS
        return TimingRow(
            op=subject.name,
            case=subject.entry.name,
            sizes=dict(subject.entry.sizes),
            dtype=str(subject.entry.dtype).removeprefix("torch."),
            direction=direction,
            mode=mode,
            peer=variant.peer,
            backend=variant.backend,
            copy_gb_s=ceiling.bytes_rate / 1e3 if ceiling.memory == "copy" else None,
            read_gb_s=ceiling.bytes_rate / 1e3 if ceiling.memory == "read" else None,
            gflop_s=ceiling.flop_rate / 1e3 or None,
            threads=threads,
            verified=verdict[0] if is_ours else None,
            verified_by=verdict[1] if is_ours else "",
            error=error,
            note=variant.note,
            machine=self.conditions.machine,
            device=self.conditions.device,
            versions=self.conditions.versions,
            commit=self.conditions.commit,
            date=self.conditions.date,
            **figures,
        )

    def _timings(
        self, subject: Subject, variants: list[Variant], again: Callable[[], dict[str, Call]]
    ) -> Iterator[tuple[str, str, int, dict[str, Timing]]]:
        """(direction, mode, calls per timing, timing of each peer)"""
        mode = "wall" if isinstance(self.clock, CpuClock) else "cold"
        forwards = {v.peer: v.forward for v in variants}
        if not subject.decoding:
            yield "forward", mode, 1, self._compare(subject, "forward", forwards)
            if subject.timed_backward:
                yield "backward", mode, 1, self._compare(subject, "backward", {v.peer: v.backward() for v in variants})
            if subject.entry.replayed and isinstance(self.clock, CudaClock):
                replays = self._graphs(self.clock, again())
                yield "forward", "replayed", GRAPH_CALLS, self._compare(subject, "forward, replayed", replays)
            return
        without = {name: torch.no_grad()(call) for name, call in forwards.items()}
        yield "forward", mode, 1, self._compare(subject, "forward", without)
        if isinstance(self.clock, CudaClock):
            graphs = self._graphs(self.clock, without)
            yield "forward", "graph", GRAPH_CALLS, self._compare(subject, "forward, graph", graphs)

    def _again(self, subject: Subject, backend: str, threads: int | None, peers: list[str]) -> dict[str, Call]:
        """Forwards of several copies of the subject in turn, together as large as the buffer that flushes L2."""
        count = min(GRAPH_CALLS, 1 + FLUSH_BYTES // subject.entry.forward_bytes)
        makers = [self._makers(subject.copy(), backend, threads) for _ in range(count)]
        calls: dict[str, Call] = {}
        for peer in peers:
            variants = [variant for variant in (make[peer]() for make in makers) if variant is not None]
            calls[peer] = torch.no_grad()(in_rotation([variant.forward for variant in variants]))
        return calls

    def _compare(self, subject: Subject, title: str, calls: Mapping[str, Call]) -> dict[str, Timing]:
        with self.say.status(f"[dim]timing {subject.name} {subject.entry.name}, {title}[/]"):
            return self.clock.compare(calls, self.request.seconds)

    def _graphs(self, clock: CudaClock, calls: Mapping[str, Call]) -> dict[str, Call]:
        replays = {}
        for name, call in calls.items():
            try:
                replays[name] = clock.graph(call, GRAPH_CALLS)
            except RuntimeError as error:
                self.say.print(f"[dim]{name} cannot be captured in a CUDA graph: {str(error)[:120]}[/]")
                torch.cuda.synchronize()
        return replays
