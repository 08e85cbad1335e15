"""The timings of one run: each subject proved, warmed up, timed beside its peers, and turned into rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console

from ...core.device import BackendUnavailable
from .prove import Prover, relative_error
from .rows import NOT_TIMED, Conditions, Row, timed
from .subject import OURS, Subject, Variant
from .timing import CpuClock, CudaClock, Timing

GRAPH_CALLS = 20


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    names: tuple[str, ...] = ()
    peers: tuple[str, ...] | None = None
    cases: tuple[str, ...] = ()
    backend: str | None = None
    device: str | None = None
    seconds: float = 0.5
    verify: bool = True


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

    def run(self, subjects: Iterator[Subject]) -> Iterator[Row]:
        for subject in subjects:
            for row in self._subject(subject):
                self.rows.append(row)
                yield row

    def _subject(self, subject: Subject) -> Iterator[Row]:
        try:
            backend = subject.choose(self.request.backend or "auto")
        except BackendUnavailable as error:
            self.say.print(f"[dim]{subject.name} {subject.entry.name}: {error}[/]")
            return
        proof = self.prover.prove(subject, backend)
        if proof[0] is False:
            self.say.print(f"[bold red]{subject.name} on {backend} is not timed: {proof[1]}[/]")
            return
        variants = [subject.ours(backend)]
        variants += filter(None, (peer.prepare(subject) for peer in self.peers.values()))
        rate = self.clock.copy_rate()
        errors: dict[str, float | None] = {}
        usable = []
        for variant in variants:
            broken = self._warm(variant)
            if broken is None:
                usable.append(variant)
                errors[variant.peer] = relative_error(subject, variant)
            else:
                note = f"did not run: {broken}"
                yield self._row(subject, variant, proof, None, "forward", "", NOT_TIMED, rate, note)
        for direction, mode, divide, timings in self._timings(subject, usable):
            moved = subject.entry.forward_bytes if direction == "forward" else subject.entry.backward_bytes
            for variant in usable:
                if variant.peer in timings:
                    figures = timed(timings[variant.peer], moved, rate, divide)
                    off = errors[variant.peer]
                    yield self._row(subject, variant, proof, off, direction, mode, figures, rate, variant.note)

    def _row(
        self,
        subject: Subject,
        variant: Variant,
        proof: tuple[bool | None, str],
        error: float | None,
        direction: str,
        mode: str,
        figures: dict[str, Any],
        rate: float,
        note: str,
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
            note=note,
            machine=self.conditions.machine,
            device=self.conditions.device,
            versions=self.conditions.versions,
            commit=self.conditions.commit,
            date=self.conditions.date,
            **figures,
        )

    def _warm(self, variant: Variant) -> str | None:
        """Why the variant does not run, or None: a peer that breaks does not end the run, ours does."""
        try:
            with self.say.status(f"[dim]warming up {variant.peer}[/]"):
                for _ in range(3):
                    variant.results()
        except Exception as error:
            if variant.peer == OURS:
                raise
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        return None

    def _timings(self, subject: Subject, variants: list[Variant]) -> Iterator[tuple[str, str, int, dict[str, Timing]]]:
        """(direction, mode, calls in each timing, timing of each peer)"""
        seconds, mode = self.request.seconds, "wall" if isinstance(self.clock, CpuClock) else "cold"
        with self.say.status(f"[dim]timing {subject.name} {subject.entry.name}[/]"):
            if subject.decoding:
                with torch.no_grad():
                    calls = {v.peer: v.forward for v in variants}
                    yield "forward", mode, 1, self.clock.compare(calls, seconds)
                    if isinstance(self.clock, CudaClock):
                        yield "forward", "graph", GRAPH_CALLS, self.clock.compare(self._graphs(calls), seconds)
                return
            yield "forward", mode, 1, self.clock.compare({v.peer: v.forward for v in variants}, seconds)
            if subject.grads and subject.entry.backward_bytes is not None:
                yield "backward", mode, 1, self.clock.compare({v.peer: v.backward() for v in variants}, seconds)

    def _graphs(self, calls: dict[str, Any]) -> dict[str, Any]:
        replays = {}
        for name, call in calls.items():
            try:
                replays[name] = self.clock.graph(call, GRAPH_CALLS)  # type: ignore[union-attr]
            except RuntimeError as error:
                self.say.print(f"[dim]{name} cannot be captured in a CUDA graph: {str(error)[:120]}[/]")
                torch.cuda.synchronize()
        return replays
