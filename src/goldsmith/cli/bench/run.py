"""The timings of one run: each subject proved, warmed up, timed beside its peers, and turned into rows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console

from ...core.device import BackendUnavailable
from .prove import Prover, Verdict, golden_result, relative_error
from .rows import NOT_TIMED, Conditions, Row, timed
from .subject import OURS, Subject, Variant
from .timing import Call, CpuClock, CudaClock, Timing

GRAPH_CALLS = 20


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    names: tuple[str, ...] = ()
    peers: tuple[str, ...] | None = None  # PEER, or PEER:TEXT for the cases whose "OP CASE" contains the text
    cases: tuple[str, ...] = ()
    backend: str | None = None
    device: str | None = None
    seconds: float = 0.5
    verify: bool = True
    commit: str = ""

    def against(self, peer: str, subject: str) -> bool:
        """Whether this peer is timed beside the subject "OP CASE"."""
        texts = [wanted.partition(":")[2] for wanted in self.peers or () if wanted.partition(":")[0] == peer]
        return not texts or any(text in subject for text in texts)


@dataclass
class Bench:
    """One run: the clock, the peers, the proofs, and the rows so far."""

    request: Request
    conditions: Conditions
    clock: CudaClock | CpuClock
    peers: dict[str, Any]
    prover: Prover
    say: Console
    rows: list[Row] = field(default_factory=list)

    def run(self, makers: Iterable[Callable[[], Subject]]) -> Iterator[Row]:
        """Inputs are drawn for one subject at a time: two large ones need not fit the card together."""
        for make in makers:
            for row in self._subject(make()):
                self.rows.append(row)
                yield row
            gc.collect()  # graphs refer to their results and these to the graphs
            if isinstance(self.clock, CudaClock):
                torch.cuda.empty_cache()

    def _subject(self, subject: Subject) -> Iterator[Row]:
        try:
            backend = subject.choose(self.request.backend or "auto")
        except BackendUnavailable as error:
            self.say.print(f"[dim]{subject.name} {subject.entry.name}: {error}[/]")
            return
        proof = self.prover.prove(subject, backend)
        if proof[0] is False:
            return  # the prover keeps why
        rate = self.clock.copy_rate()
        usable: list[Variant] = []
        for name, make in self._makers(subject, backend).items():
            variant, broken = self._ready(subject, name, make)
            if variant is not None:
                usable.append(variant)
            elif name == OURS:
                self.prover.reject(subject, backend, f"{subject.entry.name}: {broken}")
                return
            elif broken:
                stand_in = Variant(name, lambda: (), [], note=f"did not run: {broken}")
                yield self._row(subject, stand_in, proof, None, "forward", "", NOT_TIMED, rate)
        golden = golden_result(subject)
        errors = {variant.peer: relative_error(golden, variant) for variant in usable}
        del golden
        for direction, mode, divide, timings in self._timings(subject, usable):
            moved = subject.entry.forward_bytes if direction == "forward" else subject.entry.backward_bytes
            for variant in usable:
                if variant.peer in timings:
                    figures = timed(timings[variant.peer], moved, rate, divide)
                    yield self._row(subject, variant, proof, errors[variant.peer], direction, mode, figures, rate)

    def _makers(self, subject: Subject, backend: str) -> dict[str, Callable[[], Variant | None]]:
        makers: dict[str, Callable[[], Variant | None]] = {OURS: lambda: subject.ours(backend)}
        for name, peer in self.peers.items():
            if self.request.against(name, f"{subject.name} {subject.entry.name}"):
                makers[name] = partial(peer.prepare, subject)
        return makers

    def _ready(
        self, subject: Subject, name: str, make: Callable[[], Variant | None]
    ) -> tuple[Variant | None, str | None]:
        """The variant, compiled and warm, or why it does not run: what breaks at one size does not end the run."""
        try:
            with self.say.status(f"[dim]warming up {name} for {subject.name} {subject.entry.name}[/]"):
                variant = make()
                if variant is None:
                    return None, None  # it does not offer this operator
                with torch.set_grad_enabled(not subject.decoding):
                    for _ in range(3):
                        variant.results()
                    if subject.timed_backward:
                        variant.backward()()
                if isinstance(self.clock, CudaClock):
                    torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  whatever a variant raises is what is said of it
            return None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        return variant, None

    def _row(
        self,
        subject: Subject,
        variant: Variant,
        proof: Verdict,
        error: float | None,
        direction: str,
        mode: str,
        figures: dict[str, Any],
        rate: float,
    ) -> Row:
        mine = variant.peer == OURS
        return Row(
            op=subject.name,
            case=subject.entry.name,
            sizes=dict(subject.entry.sizes),
            dtype=str(subject.entry.dtype).removeprefix("torch."),
            direction=direction,
            mode=mode,
            peer=variant.peer,
            backend=variant.backend,
            copy_gb_s=rate / 1e3,
            verified=proof[0] if mine else None,
            verified_by=proof[1] if mine else "",
            error=error,
            note=variant.note,
            machine=self.conditions.machine,
            device=self.conditions.device,
            versions=self.conditions.versions,
            commit=self.conditions.commit,
            date=self.conditions.date,
            **figures,
        )

    def _timings(self, subject: Subject, variants: list[Variant]) -> Iterator[tuple[str, str, int, dict[str, Timing]]]:
        """(direction, mode, calls in each timing, timing of each peer)"""
        mode = "wall" if isinstance(self.clock, CpuClock) else "cold"
        forwards = {v.peer: v.forward for v in variants}
        if not subject.decoding:
            yield "forward", mode, 1, self._compare(subject, "forward", forwards)
            if subject.timed_backward:
                yield "backward", mode, 1, self._compare(subject, "backward", {v.peer: v.backward() for v in variants})
            return
        without = {name: torch.no_grad()(call) for name, call in forwards.items()}
        yield "forward", mode, 1, self._compare(subject, "forward", without)
        if isinstance(self.clock, CudaClock):
            graphs = self._graphs(self.clock, without)
            yield "forward", "graph", GRAPH_CALLS, self._compare(subject, "forward, graph", graphs)

    def _compare(self, subject: Subject, what: str, calls: dict[str, Call]) -> dict[str, Timing]:
        with self.say.status(f"[dim]timing {subject.name} {subject.entry.name}, {what}[/]"):
            return self.clock.compare(calls, self.request.seconds)

    def _graphs(self, clock: CudaClock, calls: dict[str, Call]) -> dict[str, Call]:
        replays = {}
        for name, call in calls.items():
            try:
                replays[name] = clock.graph(call, GRAPH_CALLS)
            except RuntimeError as error:
                self.say.print(f"[dim]{name} cannot be captured in a CUDA graph: {str(error)[:120]}[/]")
                torch.cuda.synchronize()
        return replays
