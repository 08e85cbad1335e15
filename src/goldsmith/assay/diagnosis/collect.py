"""The evidence of a failing case: the stage table, then what the first wrong tensor looks like, then other runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...core.tracing import TargetError
from ..bounds.bounded import SLACK
from ..execute.run import CandidateRun
from ..golden.golden_tensor import GoldenTensor
from ..judge import ladder
from ..judge.examination import Examination
from ..probes.maps import CELLS_BAD, error_map
from ..report.check_report import Report
from ..report.results import (
    CERTAIN,
    QUALITY,
    REFERENCE_FAULT,
    RUNGS,
    Finding,
    Location,
)
from ..support.deadline import Pace
from .choice import examined
from .closer import closer
from .cotangents import carried
from .evidence import CULPRIT, INHERITED, NO_TIME, NOT_TRIED, OBSERVED, OK, Evidence, MemoryFact, StageState
from .filled import filled
from .fits import fit
from .influence import influence
from .isolate import Isolation, handed_in, isolate, named, order
from .kept_inputs import unheard
from .leaks import leaking
from .likely import SURE
from .made_of import made_of
from .magnified import magnified
from .provenance import provenance
from .rank import strength
from .rules.reading import Reading
from .runs import facts
from .whatif import Search, search
from .whatif.engine import seconds

_LATER = ("second_call", "repeats", "layouts", "scaling")  # probes of other runs than the first
Result = TypeVar("Result")
_WHAT_IF, _MORE = 12.0, 36.0  # seconds of the processor, at most, for changed goldens, and for more of them at the end
# what a step takes at least, as a share of what the check's first probe took, which makes all references
_ISOLATION, _FITS, _GOLDEN, _RUN = 0.5, 0.25, 0.1, 0.2
_MEMORY = (
    ("guard", " bytes written ", "overrun"),
    ("guard", "", "stray_read"),
    ("alias", "which the forward returned", "output_modified"),
    ("alias", "was modified", "input_modified"),
    ("alias", "shares memory", "aliased"),
    ("poison", "", "never_written"),
)


def begin(examination: Examination, report: Report) -> Evidence:
    """What the check alone says, before anything further has run."""
    evidence = Evidence(
        report,
        memory=_memory(report),
        scalars={n: v for n, v in examination.material.scalars.items()},
        sizes=dict(examination.material.sizes),
        dtype=str(examination.dtype).removeprefix("torch."),
        unused=_unused(examination),
        grouped=any(not t.is_floating_point() for t in examination.material.inputs.values()),
    )
    first = surest(report)
    if first is not None:
        evidence.tensor, evidence.location = first.tensor, first.location
        evidence.first_wrong = first.tensor
    done = examination._first
    if report.verdict != REFERENCE_FAULT and done is not None and done.error is not None:
        said = (str(done.error).strip().splitlines() or [""])[0]
        evidence.error = f"{type(done.error).__name__}: {said}"[:300]
        evidence.first_wrong = evidence.tensor = done.phase
    return evidence


def _unused(examination: Examination) -> dict[str, list[int]]:
    """Of indices: the groups that nothing belongs to, as far as a size says how many there are."""
    found = {}
    for name, t in examination.material.inputs.items():
        if t.is_floating_point() or t.dtype == torch.bool or not t.numel() or int(t.min()) < 0:
            continue
        top = int(t.max())
        sizes = [n for n in examination.material.sizes.values() if isinstance(n, int) and top < n <= 2 * top + 2]
        known = set(t.flatten().tolist())
        left = [i for i in range(min(sizes, default=top + 1)) if i not in known]
        if left and len(left) < len(known) + 2:
            found[name] = left
    return found


@dataclass(frozen=True)
class Depth:
    """How much is asked.

    repeats    of the same call
    runs       names of other runs must begin so; None: all of them; (): none
    influence  the "input[axis]" to look at; None: all of them; (): none
    sent       output gradients are sent one at a time
    whatif     changed goldens of these causes are tried; None: of all
    """

    repeats: int = 3
    runs: tuple[str, ...] | None = None
    influence: tuple[str, ...] | None = None
    whatif: frozenset[str] | None = None
    sent: bool = False


def collect(
    examination: Examination, evidence: Evidence, depth: Depth = Depth(), *,
    spent: Callable[[float], bool] = lambda more: False, wanted: str | None = None,
) -> Isolation:  # fmt: skip
    """Fill in everything about an examination whose check has failed; returns its stage table.

    In order of what it usually tells. spent(more) says whether time is over, or would be so many seconds later: a step
    that this leaves no time for is left out, as is what a step itself stumbles over. Both are said in
    `evidence.left_out`, and the other steps still tell.
    With `wanted` nothing more is asked where another stage is certainly the first wrong one.
    """
    first = surest(evidence.report)
    unjudged = examination._first is None or examination._first.error is not None or examination._ref is None
    if evidence.report.verdict == REFERENCE_FAULT or first is None or unjudged:
        if evidence.error and not spent(0.0):
            evidence.filled = _step(evidence, "filled groups", lambda: filled(examination)) or ""
        return Isolation()
    time = _Time(examination, evidence, spent)
    made = _step(evidence, "isolation", lambda: isolate(examination)) if time.for_("isolation", _ISOLATION) else None
    table = made or _as_checked(examination)
    evidence.stages, evidence.first_wrong = table.stages, table.first_wrong or first.tensor
    _written_over(evidence, table)
    _chosen(evidence, table)
    if wanted not in (None, table.first_wrong, evidence.first_wrong) and _certain(evidence, table.first_wrong):
        return table
    if table.first_wrong is not None:
        long = time.for_("terms", _FITS)  # ratios and patterns are arithmetic on what is there: there is always time
        _step(evidence, "fits", lambda: _first_wrong(examination, evidence, table, terms=long))
    own = table.own or examination.first
    evidence.other, evidence.reused = _others(examination, own, evidence.tensor), own.reused
    if time.for_("where NaN begins", 0.0):
        evidence.born = _step(evidence, "provenance", lambda: provenance(examination, own))
    changed = None
    if depth.whatif != frozenset() and table.first_wrong in named(own) and time.for_("changed goldens", _GOLDEN):
        changed = _step(evidence, "whatif", lambda: _what_if(examination, evidence, own, depth.whatif, time))
    if depth.runs != () and time.for_("other runs", _RUN):
        spent_on_runs = time.pace("other runs")
        _step(evidence, "runs", lambda: facts(
            examination, repeats=depth.repeats, only=depth.runs, into=evidence.runs, spent=spent_on_runs
        ))  # fmt: skip
    if time.for_("other numbers of the same inputs", _RUN):
        pace = time.pace("other numbers of the same inputs")
        _step(evidence, "other numbers of the same inputs", lambda: unheard(examination, evidence, pace))
        _step(evidence, "the choice", lambda: examined(examination, evidence))
        evidence.made_of = _step(evidence, "operators", lambda: made_of(examination, evidence)) or frozenset()
    if table.first_wrong is None and first.probe in _LATER:
        evidence.first_wrong = _later(evidence) or first.tensor
    if table.first_wrong is None and not _later(evidence) and time.for_("leaks", 0.0):
        evidence.first_wrong = _step(evidence, "leaks", lambda: leaking(examination)) or evidence.first_wrong
    _before_what_inherits(evidence)
    if depth.influence != () and table.first_wrong is not None and time.for_("influence", _RUN):
        known = table.first_wrong in named(examination.first) and not table.suspects
        looked = {table.first_wrong} if known else examination.bad | {table.first_wrong}
        only, pace = depth.influence, time.pace("influence")
        right: list[tuple[str, int, int]] = []
        found = _step(evidence, "influence", lambda: influence(examination, looked, only=only, spent=pace, right=right))
        evidence.influence = found or {}
        got = named(own)[table.first_wrong][1] if table.first_wrong in named(own) else None
        seen = _step(evidence, "a closer look", lambda: closer(
            examination, table.first_wrong or "", got, evidence.influence, right, spent=pace
        ))  # fmt: skip
        evidence.influence = seen or evidence.influence
    if depth.sent and table.first_wrong is not None and time.for_("output gradients", _RUN):
        first_wrong, pace = table.first_wrong, time.pace("output gradients")
        evidence.carried = _step(evidence, "cotangents", lambda: carried(examination, own, first_wrong, spent=pace))
    nothing = not (evidence.whatif or evidence.memory or depth.whatif)
    more = changed is not None and changed.left and nothing and strength(evidence) < SURE
    if changed is not None and more and time.for_("changed goldens", 0.0):
        _step(evidence, "whatif", lambda: _tried(evidence, changed, _MORE, time))
    return table


class _Time:
    """Whether there is time for a step: what there is none for is said in `evidence.left_out`."""

    def __init__(self, examination: Examination, evidence: Evidence, spent: Callable[[float], bool]) -> None:
        self.evidence, self.spent, self.checked = evidence, spent, examination.seconds.get("values", 0.0)

    def for_(self, step: str, share: float) -> bool:
        """Whether a step can begin that takes this share of what the check's first probe took."""
        return not self._lacks(step, share * self.checked)

    def pace(self, step: str) -> Pace:
        """For the loop of such a step."""
        return Pace(lambda more: self._lacks(step, more))

    def _lacks(self, step: str, more: float) -> bool:
        lacks = self.spent(more)
        if lacks:
            self.evidence.left_out[step] = NO_TIME
        return lacks


def _as_checked(examination: Examination) -> Isolation:
    """The stage table of the check's own rows: what is wrong is seen there, and not whether it inherits that."""
    table = Isolation(own=examination.first)
    rows = {row.tensor: row for row in examination.rows if row.run == "values"}
    for name in order(examination.ref, examination.first):
        row = rows.get(name)
        if row is not None:
            state, text = (NOT_TRIED, "wrong; it was not isolated") if row.state == "bad" else (OK, "")
            kind = named(examination.first)[name][0] if name in named(examination.first) else "stage"
            table.stages.append(StageState(name, kind, row.max_over_bound, None, state, text))
    table.first_wrong = next((s.name for s in table.stages if s.state == NOT_TRIED), None)
    return table


def _certain(evidence: Evidence, first: str | None) -> bool:
    """Whether no later step can name another stage."""
    state = None if first is None else evidence.stage(first)
    return state is not None and state.state in (CULPRIT, OBSERVED, NOT_TRIED)


def _written_over(evidence: Evidence, table: Isolation) -> None:
    """A result that lies in an input's memory and overwrites it comes first: what else reads that input only inherits.

    Without such a result the stages say where it begins.
    """
    modified = [m.tensor for m in evidence.memory if m.kind == "input_modified"]
    for fact in evidence.memory:
        said = next((n for n in modified if fact.kind == "aliased" and f"shares memory with {n}:" in fact.text), None)
        if said is None or evidence.stage(fact.tensor) is None:
            continue
        wrong = dict.fromkeys((CULPRIT, OBSERVED, NOT_TRIED), INHERITED)
        reason = f"{fact.tensor} is written over {said}, which it may read"
        evidence.stages = table.stages = [
            replace(s, state=CULPRIT, text=f"written over {said}") if s.name == fact.tensor
            else replace(s, state=wrong[s.state], text=reason) if s.state in wrong and s.name.endswith(".grad") else s
            for s in table.stages
        ]  # fmt: skip
        evidence.first_wrong, table.first_wrong, table.suspects = fact.tensor, fact.tensor, []
        return


def _chosen(evidence: Evidence, table: Isolation) -> None:
    """A choice that is not legal, made of what is right, is where it begins: what is chosen by it is only another."""
    illegal = {f.tensor for f in evidence.report.findings if f.probe == "decisions" and f.rung == CERTAIN}
    for i, s in enumerate(table.stages):
        if s.state in (CULPRIT, OBSERVED, NOT_TRIED, INHERITED) or (s.propagated or 0.0) > SLACK:
            return
        if s.name in illegal:
            table.stages[i] = replace(s, state=CULPRIT, text="a choice that is not legal, of what is right")
            evidence.stages, evidence.first_wrong = table.stages, s.name
            return


def _before_what_inherits(evidence: Evidence) -> None:
    """Where all that is wrong only inherits, what it inherits is too small to be seen here: another run may show it."""
    first, later = evidence.stage(evidence.first_wrong or ""), evidence.stage(_later(evidence))
    if first is None or later is None or first.state != INHERITED:
        return
    if evidence.stages.index(later) < evidence.stages.index(first):
        evidence.first_wrong = later.name


def _later(evidence: Evidence) -> str:
    """Where it goes wrong first in the first of the other runs that is wrong."""
    return next((fact.first for fact in evidence.runs.values() if fact.first), "")


def _step(evidence: Evidence, name: str, run: Callable[[], Result]) -> Result | None:
    try:
        return run()
    except TargetError:
        raise
    except Exception as error:  # noqa: BLE001 - a diagnosis never raises for what a wrong kernel makes of its numbers
        evidence.left_out[name] = f"{type(error).__name__}: {str(error).strip()[:200]}"
        return None


def surest(report: Report) -> Finding | None:
    """The surest finding; of the golden before all others."""
    failing = [f for f in report.findings if f.rung != QUALITY]
    return min(failing, key=lambda f: (f.probe != "golden", RUNGS.index(f.rung)), default=None)


def _first_wrong(examination: Examination, evidence: Evidence, table: Isolation, terms: bool) -> None:
    """The wrong tensor as it comes from right inputs where it could be isolated, else from the candidate's own run."""
    name = table.first_wrong or ""
    state = evidence.stage(name)
    own = table.own or examination.first
    isolated = table.run is not None and name in named(table.run) and state is not None and state.isolated is not None
    done = table.run if isolated and table.run is not None and state is not None and state.state == "culprit" else own
    kind, got = (named(done) if done is own else handed_in(done)).get(name, ("stage", None))
    against = examination.ref.reference(name, kind, noise=False)
    evidence.tensor, evidence.location = name, None
    if against is None:
        return
    evidence.golden = against.bounded.value
    if got is None:
        return
    evidence.got, evidence.stored = got.detach().double(), str(got.dtype).removeprefix("torch.")
    evidence.location = _location(evidence.got, against)
    if got.is_floating_point() and got.numel() and got.shape == against.bounded.value.shape:
        evidence.map = error_map(
            examination.label, "isolated" if done is table.run else "values", got, against, CELLS_BAD, True
        )
    found = fit(examination, name, kind, got, terms=terms)
    evidence.fits, evidence.ratios, evidence.permutations = found.fits, found.ratios, found.patterns


def _what_if(
    examination: Examination, evidence: Evidence, own: CandidateRun, causes: frozenset[str] | None, time: _Time
) -> Search | None:
    got = named(own)[evidence.tensor][1]
    if got is not None and _all_poison(evidence, got):
        return None
    found = None if got is None else search(examination, evidence.tensor, got, own, causes=causes)
    if found is not None:
        _tried(evidence, found, _WHAT_IF, time)
        if not evidence.whatif:
            larger = magnified(examination, evidence.tensor, own, found, time.pace("other magnitudes"))
            if larger is not None:
                _tried(evidence, larger, _WHAT_IF, time)
        evidence.operators = found.operators
        evidence.alike = found.alike
    return found


def _all_poison(evidence: Evidence, got: Tensor) -> bool:
    """Whether all that is wrong is memory that nobody wrote: no formula makes its NaN."""
    left = any(m.kind == "never_written" and m.tensor == evidence.tensor for m in evidence.memory)
    if not left or evidence.golden is None or evidence.golden.shape != got.shape:
        return False
    r = Reading(evidence)
    return r.wrong is not None and r.wrong_count > 0 and bool(torch.isnan(got.double()[r.wrong]).all())


def _tried(evidence: Evidence, changed: Search, limit: float, time: _Time) -> None:
    over, spent = seconds(limit), time.pace("changed goldens")
    evidence.whatif = changed.run(lambda: spent() or over())
    evidence.left_out |= {f"changed goldens, {kind}": why for kind, why in changed.left_out.items()}


def _location(got: Tensor, against: GoldenTensor) -> Location | None:
    bounded = against.bounded
    if got.shape != bounded.value.shape:
        return None
    same = torch.isnan(got) & torch.isnan(bounded.value) | (got == bounded.value)
    wrong = ~((got - bounded.value).abs() <= SLACK * bounded.bound) & ~same
    return ladder.locate(against.name, wrong, against) if bool(wrong.any()) else None


def _others(examination: Examination, own: CandidateRun, tensor: str) -> dict[str, tuple[Tensor, Tensor]]:
    """The other results, candidate and golden."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, _, got in own.results():
        golden = examination.ref.values.get(name)
        if name != tensor and got is not None and golden is not None and golden.shape == got.shape:
            found[name] = got.detach().double(), golden.double()
    return found


def _memory(report: Report) -> list[MemoryFact]:
    found = []
    for f in report.findings:
        for probe, words, kind in _MEMORY:
            if words in f.text and (f.probe == probe or words and f.probe == "float32"):
                found.append(MemoryFact(kind, f.tensor, f.text, f.location))
                break
    return found


def described(examination: Examination) -> dict[str, Any]:
    """What makes the case again: its name, sizes, seed, dtype, device, threads and the inputs' layouts."""
    inputs = examination.material.inputs
    return {
        "name": examination.case.name,
        "sizes": dict(examination.material.sizes),
        "shapes": {n: list(t.shape) for n, t in inputs.items()},
        "seed": examination.seed,
        "dtype": str(examination.dtype).removeprefix("torch."),
        "device": str(examination.device),
        "threads": torch.get_num_threads(),
        "strides": {n: list(t.stride()) for n, t in inputs.items()},
    }
