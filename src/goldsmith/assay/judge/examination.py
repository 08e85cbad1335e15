"""Examination: one case in one dtype. It runs the candidate, keeps its first run, and collects findings.

Probes are functions of an Examination. It checks once, for all probes, what must hold in every run: no write outside a
buffer, no changed input, no unwritten element, no shared memory.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...core.tracing import TargetError
from ..declare.binding import inputs_and_scalars
from ..declare.case import LARGE, Case
from ..declare.domain import OutsideDomain
from ..declare.returned_values import UnusableResult
from ..declare.target import Target
from ..execute import device_moves, hooks, interpreter, raised
from ..execute.memory_marks import NAN_FILL, ZERO_FILL
from ..execute.records import CandidateRun, Material, RunSettings
from ..execute.run import execute
from ..golden.golden_cache import GoldenCache, shared_or
from ..golden.golden_error import GoldenError
from ..golden.golden_results import GoldenResults
from ..report.results import (
    CERTAIN,
    GOLDEN_RAISED,
    NOT_JUDGED,
    NOT_NEEDED,
    QUALITY,
    STATISTICAL,
    SYSTEMATIC,
    ErrorMap,
    Finding,
    Location,
    Note,
    Row,
)
from ..support import deadline, inplace_errors
from ..support.stage_tiles import join_pieces
from . import ladder
from .hint import Hint


class Ended(Exception):
    """The case cannot continue: the candidate raised in its first run, or the budget is spent."""


@dataclass
class Budget:
    """The time limit of a whole check, in seconds; None: no limit."""

    seconds: float | None
    started: float

    @property
    def spent(self) -> bool:
        return self.seconds is not None and (time.perf_counter() - self.started > self.seconds or deadline.cut())

    @property
    def spent_text(self) -> str:
        return f"the budget of {self.seconds:g} s was spent"

    @contextmanager
    def ends(self, examination: Examination) -> Iterator[None]:
        """Inside, costly work that no longer fits is skipped, and a note names it."""
        if self.seconds is None:
            yield
            return
        with deadline.until(self.started + self.seconds) as left_out:
            try:
                yield
            finally:
                for probe_name in left_out:
                    examination.note("budget", probe_name, f"{self.spent_text}; left out: {probe_name}", probe_name)


class Examination:
    """The state of one case in one dtype, which probes read and write."""

    def __init__(
        self,
        target: Target,
        case: Case,
        dtype: torch.dtype,
        device: str | torch.device,
        seed: int,
        selected: frozenset[str],
        label: str,
        *,
        on_device: bool = False,
    ):
        self.key = uuid.uuid4().hex  # of the first run's results, whose memory is kept
        self.target, self.case, self.dtype, self.device, self.seed = target, case, dtype, device, seed
        self.selected, self.label, self.on_device = selected, label, on_device
        self.findings: list[Finding] = []
        self.notes: list[Note] = []
        self.rows: list[Row] = []
        self.maps: dict[str, ErrorMap] = {}
        self.hints: dict[str, Hint] = {}  # tensor -> what to add to a finding about it
        self.declared: list[tuple] = []  # (run, declaration, golden results) that hints were taken from
        self.problems: list[str] = []
        self.bad: set[str] = set()
        self.short = ""  # the message of an out-of-memory error
        self.repeated = 0  # runs of the same inputs after the first
        self.candidate_runs = 0
        self.plain_calls = 0  # beside the runs: a call without guard bands costs a tenth of a run
        self.seconds: dict[str, float] = {}  # per probe
        self.interpreted = 0  # kernels that ran in Triton's interpreter
        self.stages: list[str] = []
        self.material = self.draw(case)
        self._references: list[GoldenResults] = []
        self.goldens = GoldenCache()
        self._first: CandidateRun | None = None
        self._ref: GoldenResults | None = None

    def on_its_device(self) -> Examination:
        """A new examination of the same case whose golden runs on the candidate's device, however small the case is."""
        same = (self.target, self.case, self.dtype, self.device, self.seed, self.selected, self.label)
        return Examination(*same, on_device=True)

    # material and runs

    def draw(self, case: Case) -> Material:
        """Draw the case's inputs: on the CPU where the golden can run there, otherwise on the candidate's device."""
        device = torch.device(self.device)
        if device.type != "cpu" and not self.on_device and LARGE not in case.tags:
            with suppress(TargetError):  # of a draw that holds tensors on the device
                placed = device_moves.placed(self._drawn(case, torch.device("cpu")), device)
                if placed is not None:
                    return placed
        return self._drawn(case, device)

    def _drawn(self, case: Case, device: torch.device) -> Material:
        supply = case.build(self.dtype, device, self.seed)
        inputs, scalars = inputs_and_scalars(supply)
        return Material(self.target, case.name, case.sizes, inputs, scalars, self.seed, order=tuple(supply))

    def variant(self, salt: int) -> Material:
        """Other values of the same sizes, with other output gradients; integers of variant 1 repeat."""
        return replace(self.draw(self.case.variant(salt, repeating=salt == 1)), seed=self.seed + 7919 * salt)

    def execute(
        self, probe: str, label: str, how: RunSettings | None = None, material: Material | None = None, *,
        look: bool = True,
    ) -> CandidateRun:  # fmt: skip
        """Run the candidate, and check what must hold in every run."""
        material = material or self.material
        if not self.admits(material):
            return CandidateRun(error=OutsideDomain(f"{label}: left out, `where` of the case excludes these inputs"))
        self.candidate_runs += 1
        how = how or RunSettings()
        if how.fill == NAN_FILL and "poison" not in self.selected:
            how = replace(how, fill=ZERO_FILL)
        with hooks.running(self.label, probe, label, self.seed, self.findings):
            run = execute(material, how)
        if how.plain is not None:
            self.candidate_runs -= 1
            self.plain_calls += 0 if run.plain is None else run.plain.calls
        if run.between is not None:
            self.candidate_runs += 1
            self._received("other inputs", run.between, look)
        return self._received(label, run, look)

    def admits(self, material: Material) -> bool:
        """Whether these are inputs that the kernel must take; those of other cases are their own draws."""
        if material is self.material or material.case != self.case.name:
            return True
        return self.case.admits(material.supply, material.sizes)

    def _received(self, label: str, run: CandidateRun, look: bool) -> CandidateRun:
        self.interpreted += run.interpreted.launches
        if interpreter.distrusted(run.interpreted, self.target.compute_dtype(self.material.inputs)):
            self._written_outside(label, run)  # where a kernel writes does not depend on what it computes
            self.note(NOT_JUDGED, self.target.name or "", interpreter.NO_BFLOAT16)
            raise Ended("bfloat16 in Triton's interpreter")
        if self._ref is not None:
            join_pieces(run.stages, run.covered, self._ref.values)
        if look:
            self.look(label, run)
        return run

    @property
    def first(self) -> CandidateRun:
        """The plain run that all others are compared with."""
        if self._first is None:
            raise RuntimeError("probe 'values' has not run yet")
        return self._first

    @first.setter
    def first(self, run: CandidateRun) -> None:
        self._first = run

    @property
    def ref(self) -> GoldenResults:
        if self._ref is None:
            raise RuntimeError("probe 'values' has not run yet")
        return self._ref

    @ref.setter
    def ref(self, references: GoldenResults) -> None:
        self._ref = references

    def same_decisions(self, run: CandidateRun) -> bool:
        """Whether a run decided as the first one did; it may break ties differently or draw another mask."""
        return all(
            torch.equal(first_choice, choice)
            if first_choice is not None and choice is not None and first_choice.shape == choice.shape
            else first_choice is choice
            for first_choice, choice in ((decided(self.first, n), decided(run, n)) for n in self.target.decisions)
        )

    def references(
        self, material: Material, run: CandidateRun, decisions: Mapping[str, Tensor] | None = None
    ) -> GoldenResults:
        """The golden's results for a run; counted."""
        reference = shared_or(self.goldens).results(material, run, decisions, material.seed)
        self._references.append(reference)
        return reference

    @property
    def golden_count(self) -> int:
        return sum(sum(r.counts.values()) for r in self._references)

    # findings

    def find(
        self, rung: str, probe: str, tensor: str, text: str, *, where: Location | None = None,
        measured: float | None = None, limit: float | None = None, trick: str = "", kind: str = "", run: str = "",
        values: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Add a finding, unless its probe is not selected or has already reported this tensor."""
        if probe not in self.selected or any(
            (f.rung, f.probe, f.tensor) == (rung, probe, tensor) for f in self.findings
        ):
            return
        self.findings.append(
            Finding(rung, probe, tensor, where, measured, limit, text, self.label, trick, kind, run, values or {})
        )

    def note(self, id: str, tensor: str, text: str, left_out: str = "") -> None:
        if not any((n.id, n.tensor) == (id, tensor) for n in self.notes):
            self.notes.append(Note(id, tensor, text, self.label, left_out))

    def absorb(self, judgement: ladder.Judgement, *, failing: bool = True) -> bool:
        """Adopt a judgement's row, findings and notes; True when it is worse than QUALITY."""
        row = judgement.row
        if not failing and not judgement.ok:
            row = replace(row, state="note")
        self.rows.append(row)
        for note in judgement.notes:
            self.note(note.id, note.tensor, note.text, note.left_out)
        if failing:
            self.findings.extend(f for f in map(self._attributed, judgement.findings) if f is not None)
        return not judgement.ok

    def _attributed(self, finding: Finding) -> Finding | None:
        """The finding, under the probe that measures its rung; None if that probe was not selected."""
        owner = {STATISTICAL: "ensemble", SYSTEMATIC: "statistics", QUALITY: "ensemble"}.get(
            finding.rung, finding.probe
        )
        if finding.probe != "values" or owner == "values":
            return finding
        return replace(finding, probe=owner) if owner in self.selected else None

    def locate(self, name: str, mask: Tensor) -> Location:
        """Where the True elements of `mask` lie in tensor `name`."""
        reference = self._ref.reference(name, "output", noise=False) if self._ref is not None else None
        if reference is not None and reference.bounded.value.shape == mask.shape:
            return ladder.locate(name, mask, reference)
        share = float(mask.double().mean()) if mask.numel() else 0.0
        return Location(name, fraction=share, text=f"{int(mask.sum())} of {mask.numel()} elements")

    def raised(self, probe: str, label: str, run: CandidateRun, called: str = "") -> bool:
        """Whether a run raised, or gave results of other names than the first run, so that it cannot be judged.

        Adds a finding then, or a note where Triton's interpreter lacks a feature.

        called: the run's name, if the label is a phrase
        """
        if run.error is None:
            return self._renamed(probe, label, run)
        if isinstance(run.error, OutsideDomain):
            self.note(NOT_NEEDED, probe, f"{label}: `where` of the case excludes these inputs; not run")
            return True
        reason = f"{type(run.error).__name__}: {_one_line(run.error)}{raised.place(run.error)}"
        if raised.from_interpreter(run.error):
            self.note(NOT_JUDGED, self.target.name or "", f"cannot run in the interpreter: {reason}")
            raise Ended("interpreter")
        if isinstance(run.error, UnusableResult):
            self.find(CERTAIN, probe, run.phase, f"the candidate's {run.error} ({label})", trick="lazy_output",
                      kind="unusable", run=label)  # fmt: skip
            return True
        edits = inplace_errors.edited(run.error, self.target.wanted_grads(self.material.inputs))
        reason = reason if edits is None else edits + raised.place(run.error)
        text = f"the candidate raised in its {run.phase} ({label}): {reason}"
        error = f"{type(run.error).__name__}: {_one_line(run.error)}"
        self.find(CERTAIN, probe, run.phase, text, kind="raised", run=called or label, values={"error": error})
        return True

    def _renamed(self, probe: str, label: str, run: CandidateRun) -> bool:
        names = ", ".join(run.names), ", ".join(self.first.names if self._first else run.names)
        if run.plain is None and names[0] != names[1]:
            text = f"the results are {names[0] or 'none'} ({label}), and were {names[1] or 'none'} in the first run"
            self.find(CERTAIN, probe, run.phase, text, kind="differs", run=label)
            return True
        return False

    def golden_raises(self, label: str, material: Material, run: CandidateRun) -> bool:
        """Whether the golden raises on a probe's own inputs as well; then the inputs are to blame."""
        try:
            self.references(material, run).values  # noqa: B018
        except GoldenError as error:
            self.note(
                GOLDEN_RAISED, self.target.name or "", f"{label}: the golden raises there, too ({error}); not judged"
            )
            return True
        return False

    # what must hold in every run

    def look(self, label: str, run: CandidateRun) -> None:
        """Check guard bands, inputs, shared memory and poison of one run."""
        self._written_outside(label, run)
        for text in run.changed_settings:
            self.note(
                "settings",
                text.partition(",")[0],
                f"{text} after a run ({label}), which affects everything that runs later",
            )
        if "guard" in self.selected:
            for name, mask in run.from_bands.items():
                where = self.locate(name, mask)
                text = f"{name} holds memory from outside a buffer: {where.text} ({label}); a stray read"
                self.find(CERTAIN, "guard", name, text, where=where, kind="stray_read", run=label)
        if "alias" in self.selected:
            self._memory(label, run)
        if "poison" in self.selected and run.error is None:
            for name, mask in run.unwritten.items():
                where = self.locate(name, mask)
                text = (
                    f"{name} holds uninitialised memory: {where.text} never written, or added to what was never written"
                )
                trick = "reused_memory" if where.fraction == 1 else ""
                self.find(CERTAIN, "poison", name, text, where=where, measured=where.fraction, limit=0.0, trick=trick,
                          kind="never_written")  # fmt: skip

    def _written_outside(self, label: str, run: CandidateRun) -> None:
        for hit in run.overruns:
            at = {"bytes": hit.bytes, "side": hit.side, "distance": hit.distance, "body": hit.body}
            self.find(
                CERTAIN, "guard", _owner(hit.label), f"{hit.text} ({label})", kind="overrun", run=label, values=at
            )

    def _memory(self, label: str, run: CandidateRun) -> None:
        for name, mask in run.changed.items():
            where = Location(name, fraction=float(mask.double().mean()), text=_count(mask))
            kind = "output gradient" if name.startswith("grad_") else "input"
            by = "forward" if name in run.by_forward else run.phase
            text = f"the {kind} {name} was modified: {where.text} ({label}, by the {by})"
            self.find(
                CERTAIN, "alias", name, text, where=where, trick="input_changed", kind="input_modified", run=label
            )
        for name, mask in run.overwritten.items():
            where = Location(name, fraction=float(mask.double().mean()), text=_count(mask))
            text = f"the backward modified {name}, which the forward returned: {where.text}"
            self.find(CERTAIN, "alias", name, text, where=where, trick="late_write", kind="output_modified")
        shared = self._ref.shared if run.aliases and self._ref is not None else set()
        for name, other in sorted(run.aliases - shared):
            text = f"{name} shares memory with {other}: writing one changes the other"
            text = f"elements of {name} share memory: writing one changes others" if name == other else text
            self.find(CERTAIN, "alias", name, text, trick="aliased_output", kind="aliased", values={"with": other})


def decided(run: CandidateRun, name: str) -> Tensor | None:
    """A run's decision `name`: an output, a saved output or a stage."""
    everything = {**run.stages, **run.outputs}
    return everything.get(name, everything.get(f"saved.{name}"))


def _count(mask: Tensor) -> str:
    return f"{int(mask.sum())} of {mask.numel()} elements"


def _owner(label: str) -> str:
    return label if label.isidentifier() else label.split(" [")[0]


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return text if len(text) <= 300 else text[:297] + "..."
