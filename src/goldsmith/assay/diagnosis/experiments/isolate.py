"""Finds the first wrong stage: judges every named stage on the golden's inputs (isolated) and on the candidate's own.

One run isolates all stages at once: each stage hands in its value and continues with the golden's. A stage that is
wrong in this run is wrong on right inputs. Each stage that is wrong in the candidate's own run is then substituted
alone. If nothing after it moves, the candidate ignores the returned value. If something right goes wrong, the stage
is only defined differently from the golden's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...bounds.bounded import SLACK
from ...execute.records import CandidateRun, RunSettings
from ...golden.golden_error import GoldenError
from ...golden.golden_results import GoldenResults
from ...golden.golden_tensor import GoldenTensor
from ...judge import ladder
from ...judge.examination import Examination
from ...probes import decisions
from ..facts.evidence import CULPRIT, INHERITED, NOT_JUDGED, OBSERVED, OK, StageState

PROBE = "isolation"
_ALONE = 8  # stages substituted alone, at most
_FARTHER = 1.1  # factor by which an error must grow
_ROUNDS = 4  # repetitions of the isolation without differently defined stages, at most


@dataclass
class Isolation:
    """The stage table in the golden's order, the first wrong stage, and the runs behind them.

    ignored    stages whose returned value the candidate does not use
    otherwise  stages that the candidate defines differently from the golden, and correctly
    suspects   golden stages that the candidate does not name, each of which could cause exactly these wrong elements
    own, run   the candidate's own run with its stages, and the isolated run (None: it raised, or nothing to isolate)
    """

    stages: list[StageState] = field(default_factory=list)
    first_wrong: str | None = None
    ignored: set[str] = field(default_factory=set)
    otherwise: set[str] = field(default_factory=set)
    suspects: list[str] = field(default_factory=list)
    own: CandidateRun | None = None
    run: CandidateRun | None = None


def isolate(examination: Examination) -> Isolation:
    """The stage table of an examination whose probe `values` has run.

    Costs one run of the candidate, one more for each of at most 8 wrong stages, and one run of the golden for each
    stage that the candidate does not name.
    """
    own = examination.first
    if own.called_tracing:
        own = _execute(examination, {}, debug=True)
        own = examination.first if own.error is not None else own
    work = _Work(examination, own)
    names = order(examination.ref, own)
    table = Isolation(own=own)
    work.own_states(names)
    if not any(bad for _, bad in work.propagated.values()):
        table.stages = work.states(names, table)
        return table
    for _ in range(_ROUNDS):
        table.run = work.isolate(skip=table.otherwise)
        otherwise = work.try_alone(names, table)
        if not otherwise:
            break
        table.otherwise |= otherwise
    table.stages = work.states(names, table)
    table.first_wrong = _first(table.stages)
    table.suspects = suspects(examination, own, names, table) if table.first_wrong is not None else []
    return table


def order(ref: GoldenResults, own: CandidateRun) -> list[str]:
    """Names in the order of the golden: stages, outputs, backward stages (autograd's in reverse), gradients."""
    wanted = [f"{n}.grad" for n in ref.material.target.wanted_grads(ref.material.inputs)]
    names = [n for n in ref.order if n not in wanted]
    seen = set(names)
    outputs = [names.index(n) for n in ref.outputs if n in seen]
    after = max(outputs, default=len(names) - 1) + 1
    names[after:after] = [n for n in ref.bounded if n.startswith("saved.") and n not in seen]
    for name in [n for n in names if n.startswith("saved.") and n.removeprefix("saved.") in seen]:
        names.remove(name)  # a saved tensor stands where the golden computes the stage of that name
        names.insert(names.index(name.removeprefix("saved.")) + 1, name)
    hooked = [f"{n}.grad" for n in reversed(names) if f"{n}.grad" in ref.bounded and f"{n}.grad" not in seen]
    last = [n for n in wanted if n in ref.bounded]
    names = list(dict.fromkeys([*names, *hooked, *last]))
    return [n for n in names if n in ref.bounded]


def named(run: CandidateRun) -> dict[str, tuple[str, Tensor | None]]:
    """All named tensors of a run, results and stages, with their kinds."""
    tensors: dict[str, tuple[str, Tensor | None]] = {n: ("stage", t) for n, t in run.stages.items()}
    tensors.update({n: (k, t) for n, k, t in run.results()})
    return tensors


def handed_in(run: CandidateRun) -> dict[str, tuple[str, Tensor | None]]:
    """The same for an isolated run. If a result and a stage share a name, the stage's value counts."""
    return {n: (kind, run.stages.get(n, t)) for n, (kind, t) in named(run).items()}


def _execute(examination: Examination, substitute: Mapping[str, Tensor], *, debug: bool) -> CandidateRun:
    how = RunSettings(substitute=substitute, debug=debug)
    return examination.execute(PROBE, "isolation", how, look=False)


def _first(stages: list[StageState]) -> str | None:
    for state in (CULPRIT, OBSERVED, INHERITED):
        for stage in stages:
            if stage.state == state:
                return stage.name
    return None


class _Work:
    """The runs behind one table, and their verdicts."""

    def __init__(self, examination: Examination, own: CandidateRun):
        self.examination, self.own = examination, own
        self.propagated: dict[str, tuple[float, bool]] = {}
        self.isolated: dict[str, tuple[float, bool]] = {}
        self.substituted: frozenset[str] = frozenset()
        self.alone: dict[str, CandidateRun] = {}
        self._fresh: tuple[CandidateRun, GoldenResults] | None = None

    # runs

    def own_states(self, names: list[str]) -> None:
        self.propagated = self.judge(self.own, names, frozenset(), isolated=False)

    def golden(
        self, ref: GoldenResults, run: CandidateRun, skip: frozenset[str] | set[str] = frozenset()
    ) -> dict[str, Tensor]:
        """The golden's value for every name of the run with the same shape."""
        out = {}
        for name, (_, tensor) in named(run).items():
            bounded = ref.bounded.get(name)
            if bounded is not None and tensor is not None and tensor.shape == bounded.value.shape and name not in skip:
                out[name] = bounded.value
        return out

    def isolate(self, skip: set[str]) -> CandidateRun | None:
        substitute = self.golden(self.examination.ref, self.own, skip)
        run = _execute(self.examination, substitute, debug=self.own is not self.examination.first)
        self.isolated = {}
        if run.error is not None:
            return None
        self.substituted = frozenset(substitute)
        self.isolated = self.judge(run, list(self.propagated), frozenset(skip), isolated=True)
        return run

    def judge(
        self, run: CandidateRun, names: list[str], skip: frozenset[str], *, isolated: bool
    ) -> dict[str, tuple[float, bool]]:
        """name -> (worst error / bound, True if the ladder rejects it); decisions are judged elsewhere."""
        out: dict[str, tuple[float, bool]] = {}
        mine = handed_in(run) if isolated else named(run)
        noise = "ensemble" in self.examination.selected
        for name in names:
            if name not in mine or name in self.examination.target.decisions:
                continue
            kind, tensor = mine[name]
            ref = self.examination.ref.reference(name, kind, noise=noise)
            if ref is None:
                continue
            if tensor is None and kind == "grad":
                tensor = torch.zeros_like(self.examination.material.inputs[name.removesuffix(".grad")])
            confirm = self._confirm(name, kind, skip, isolated) if noise else None
            finding = ladder.judge(name, tensor, ref, probe=PROBE, confirm=confirm)
            ratio = finding.row.max_over_bound
            ratio = finding.row.max_error if ratio is None else ratio
            out[name] = (ratio, not finding.ok)
        return out

    def _confirm(self, name: str, kind: str, skip: frozenset[str], isolated: bool) -> ladder.Confirm:
        """The same tensor under a fresh seed; run only if an alarm needs it."""

        def confirm(attempt: int) -> tuple[Tensor, GoldenTensor]:
            plain, ref = self.fresh()
            run = plain
            if isolated:
                run = self._isolated_fresh(skip)
            tensor = (handed_in(run) if isolated else named(run)).get(name, (kind, None))[1]
            reference = ref.reference(name, kind)
            if reference is None:
                raise RuntimeError(f"the golden has {name!r} under one seed, but not under another")
            return torch.zeros_like(reference.bounded.value) if tensor is None else tensor, reference

        return confirm

    def fresh(self) -> tuple[CandidateRun, GoldenResults]:
        if self._fresh is None:
            material = self.examination.variant(211)
            how = RunSettings(debug=self.own is not self.examination.first)
            run = self.examination.execute(PROBE, "isolation, fresh seed", how, material, look=False)
            plain = self.examination.references(material, run)
            self._fresh = run, decisions.settle(self.examination, run, plain)
        return self._fresh

    def _isolated_fresh(self, skip: frozenset[str]) -> CandidateRun:
        plain, ref = self.fresh()
        how = RunSettings(substitute=self.golden(ref, plain, skip), debug=self.own is not self.examination.first)
        return self.examination.execute(PROBE, "isolation, fresh seed", how, ref.material, look=False)

    # stages alone

    def try_alone(self, names: list[str], table: Isolation) -> set[str]:
        """Substitute each wrong stage alone. Fills `ignored`; returns the stages that are only defined differently."""
        otherwise = set()
        results = {n for n, _, _ in self.own.results()}
        for name in names:
            _, bad = self.propagated.get(name, (0.0, False))
            if not bad or name in results or name in self.alone or len(self.alone) >= _ALONE:
                continue
            bounded = self.examination.ref.bounded[name]
            substitute = {name: bounded.value}
            if name.endswith(".grad"):  # autograd's own: substituted with its stage
                stage = name.removesuffix(".grad")
                if stage in self.own.stages:
                    substitute[stage] = self.own.stages[stage]
            if self.own.stages[name].shape != bounded.value.shape:
                continue
            run = self.alone[name] = _execute(
                self.examination, substitute, debug=self.own is not self.examination.first
            )
            if run.error is not None:
                continue
            if not self._moved(name, run):
                table.ignored.add(name)
            elif self._worse(name, names, run):
                otherwise.add(name)
        return otherwise

    def _moved(self, name: str, run: CandidateRun) -> bool:
        mine, theirs = named(self.own), named(run)
        for other, (_, tensor) in mine.items():
            second = theirs.get(other, ("", None))[1]
            if other not in (name, f"{name}.grad") and not _same(tensor, second):
                return True
        return False

    def _worse(self, name: str, names: list[str], run: CandidateRun) -> bool:
        """True if the golden's value makes a right tensor wrong, or the nearest wrong one worse."""
        before, mine = named(self.own), named(run)
        nearest = True
        for other in names:
            own = self.propagated.get(other)
            if other in (name, f"{name}.grad") or own is None or other not in mine:
                continue
            kind, tensor = mine[other]
            ref = self.examination.ref.reference(other, kind, noise=False)
            if ref is None or tensor is None or _same(before[other][1], tensor):
                continue
            if not own[1] and not ladder.judge(other, tensor, ref, probe=PROBE).ok:
                return True
            # a tensor that is right with all stages on the golden's values reads this one as the golden defines it; its
            # error while the others stay wrong shows nothing
            counts = nearest and self.isolated.get(other, (0.0, True))[1]
            if own[1] and counts and _off(tensor, ref) > _FARTHER * _off(before[other][1], ref):
                return True
            nearest = False
        return False

    # the table

    def states(self, names: list[str], table: Isolation) -> list[StageState]:
        mine = named(self.own)
        blind = {s: reach(self.examination, s) for s in table.ignored}
        rows = []
        for name in names:
            kind = mine[name][0] if name in mine else _kind(self.examination, name)
            own, alone = self.propagated.get(name), self.isolated.get(name)
            if own is None:
                unnamed = self.own.flaws.get(name, "the candidate does not name it")
                text = unnamed if name not in mine else "a decision: judged by its margins"
                rows.append(StageState(name, kind, state=NOT_JUDGED, text=text))
                continue
            state, text, ignored = self._state(name, own, alone, table, blind)
            rows.append(StageState(name, kind, own[0], None if alone is None else alone[0], state, text, ignored))
        return rows

    def _state(
        self, name: str, own: tuple[float, bool], alone: tuple[float, bool] | None, table: Isolation,
        blind: Mapping[str, Mapping[str, Tensor]],
    ) -> tuple[str, str, tuple[str, ...]]:  # fmt: skip
        if not own[1]:
            return OK, "", ()
        if name in table.otherwise:
            return NOT_JUDGED, "defined differently from the golden: with the golden's value, later stages go wrong", ()
        if alone is None:
            return OBSERVED, "wrong; it could not be isolated" + ("" if table.run else ": the isolated run raised"), ()
        if not alone[1]:
            return INHERITED, "right on the golden's inputs", ()
        before = [s for s, reached in blind.items() if s != name and name in reached and bool(reached[name].any())]
        if before:
            return OBSERVED, f"wrong, and the candidate ignores a substituted {', '.join(before)}", tuple(before)
        others = self.substituted - {name}
        return CULPRIT, "wrong on the golden's inputs" if others else "wrong; no earlier stage is named", ()


def _kind(examination: Examination, name: str) -> str:
    outputs = examination.ref.outputs
    return "output" if name in outputs else "saved" if name.startswith("saved.") else "stage"


def _off(tensor: Tensor | None, ref: GoldenTensor) -> float:
    """Root mean square of the error over finite elements."""
    golden = ref.bounded.value
    if tensor is None or tensor.shape != golden.shape:
        return float("inf")
    if bool((~torch.isfinite(tensor) & torch.isfinite(golden)).any()):
        return float("inf")
    error = (tensor.double() - golden)[torch.isfinite(golden)]
    return float(error.square().mean().sqrt()) if error.numel() else 0.0


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


# stages that the candidate does not name


def reach(examination: Examination, stage: str) -> dict[str, Tensor]:
    """The elements of every golden result and stage that depend on `stage`: those that NaN in its place reaches.

    Empty if the golden uses the stage as indices, since NaN is not a valid index.
    """
    ref = examination.ref
    value = ref.values[stage]
    if not value.is_floating_point():
        return {}
    replaced = {**ref.decisions, stage: torch.full_like(value, torch.nan)}
    stem = stage.removesuffix(".grad")
    if stem != stage and stem in ref.values:
        replaced[stem] = ref.values[stem]
    try:
        changed = GoldenResults(ref.material, ref.run, replaced, ref.seed).values
    except GoldenError:
        return {}
    return {n: torch.isnan(t) & ~torch.isnan(ref.values[n]) for n, t in changed.items() if n in ref.values}


def suspects(examination: Examination, own: CandidateRun, names: list[str], table: Isolation) -> list[str]:
    """Golden stages that the candidate does not name and that reach every wrong element, those that reach fewest first.

    A stage that reaches every element of a right stage may still be a suspect by another path, so only wrong and right
    results decide: the closer its reach fits the wrong elements, the earlier it is listed.
    """
    mine = named(own)
    wrong: dict[str, Tensor] = {}
    for name, (_, tensor) in mine.items():
        bounded = examination.ref.bounded.get(name)
        if bounded is None or tensor is None or name in table.otherwise or tensor.shape != bounded.value.shape:
            continue
        y = tensor.double()
        wrong[name] = ~((y - bounded.value).abs() <= SLACK * bounded.bound) & ~torch.isnan(bounded.value)
    if not any(bool(mask.any()) for mask in wrong.values()):
        return []
    candidates: list[tuple[int, int, str]] = []
    for place, stage in enumerate(names):
        if stage in mine or stage not in examination.ref.values:
            continue
        reached = reach(examination, stage)
        if all(bool((reached.get(n, torch.zeros_like(m)) | ~m).all()) for n, m in wrong.items()):
            size = sum(int(reached[n].sum()) for n in wrong if n in reached)
            candidates.append((size, -place, stage))
    return [stage for _, _, stage in sorted(candidates)]
