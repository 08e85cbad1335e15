"""`check`: a computation on several ranks is judged against its unsharded golden, and a wrong one is explained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.tracing import TargetError
from .. import probes as catalogue
from ..checks import examine
from ..declare.case import Case
from ..declare.explained_arguments import explained_options
from ..declare.target import Target, listed
from ..execute import hooks
from ..report.check_report import Report
from ..report.results import CERTAIN, FAIL, PASS, REFERENCE_FAULT, UNJUDGED, AssayError, Finding, ProbeRun
from .causes import RankFinding
from .explain import explain, ranks_text, views
from .layout import Coordinates, assembled, coordinates, part
from .plain_step import PlainStep, Values
from .pool import START_S, RankError, RankGroup, RankPool
from .rank_run import RankCall, import_target, run
from .simulated import SimulatedRanks
from .target import RankTarget

PROBES = ("values", "ensemble", "decisions")
PROBE = "ranks"


@explained_options
def check(
    target: RankTarget,
    ranks: int | RankGroup,
    case: Case | str | None = None,
    *,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
    raises: bool = True,
) -> Report:
    """Run a target's candidate on ranks, judge it against its golden in one process, and explain what is wrong.

    ranks   a number of processes to start on this machine (gloo on CPUs), a RankPool or SimulatedRanks
    case    a Case, its name, or None for all; dtype, seed, raises as for assay.check

    Every rank's tensors are judged: shards are joined, partial sums are added, and replicas must each be right. The
    report's environment has the causes under "ranks". A rank that raises, dies or hangs is a finding that names it.
    """
    if not isinstance(target, RankTarget):
        raise TypeError(f"ranks.check: expected an assay.ranks.RankTarget, got {type(target).__name__}")
    if isinstance(ranks, SimulatedRanks) and not target.dtensors:
        raise TargetError(
            f"{target.name}: only functions of DTensors (dtensors=True) run on simulated ranks, because a step may ask "
            "which rank it is on; use a RankPool, or a number of ranks"
        )
    pool: RankGroup = RankPool(ranks) if isinstance(ranks, int) else ranks
    try:
        cases = target.cases if case is None else (target.case(case),)
        dtypes = target.dtypes if dtype is None else (dtype,)
        reports, lost = [], ""
        for each, drawn in [(c, d) for c in cases for d in (dtypes[:1] if c.given else dtypes)]:
            if not pool.alive:  # after a rank was lost
                if pool is ranks:
                    lost = "ended early, because a rank was lost"
                    break
                pool = RankPool(pool.world)
            label = each.name if len(dtypes) == 1 or each.given else f"{each.name} {str(drawn).removeprefix('torch.')}"
            reports.append(_one_case(target, pool, each, drawn, hooks.seed_of(seed), label))
    finally:
        if pool is not ranks:
            pool.close()
    report = _joined(target, reports)
    report.partial = lost
    if raises and not report.ok:
        raise AssayError(report)
    return report


def _one_case(target: RankTarget, pool: RankGroup, case: Case, dtype: torch.dtype, seed: int, label: str) -> Report:
    mesh = target.sizes(pool.world)
    sizes = tuple(mesh.values())
    step = PlainStep(target, case.build(dtype, "cpu", seed), sizes, seed)
    facts: dict[str, Any] = {"ranks": {"world": pool.world, "mesh": mesh, "device": pool.device, "causes": []}}
    name = str(dtype).removeprefix("torch.")

    changed: dict[str, list[int]] = {}
    returned: set[str] = set()

    def runs(fill: bool) -> dict[str, list[Tensor | None]]:
        answers = pool.run(run, [(call,) for call in calls(target, step, pool, mesh, fill=fill)])
        for rank, answer in enumerate(answers):
            returned.update(answer.parts)
            for n in answer.changed if fill else ():
                changed.setdefault(n, []).append(rank)
        return {n: [answer.parts.get(n) for answer in answers] for n in step.names}

    try:
        if target.load is not None:
            pool.run(import_target, [(target.load,)] * pool.world, limit_s=START_S)
        judge = _Judge(target, step, runs, seed, label)
    except RankError as error:
        finding = Finding(CERTAIN, PROBE, "", None, None, None, str(error), label)
        return Report(target.name or "", FAIL, findings=[finding], environment=facts, cases=[label], dtypes=[name],
                      probes=[ProbeRun(PROBE, True, runs=1)])  # fmt: skip
    report = judge.report()
    _add_facts_of_the_run(report, target, {n for n in step.outputs if n not in returned}, returned, changed)
    report.environment = {**report.environment, **{k: {**v, **report.environment.get(k, {})} for k, v in facts.items()}}
    report.probes = [*report.probes, ProbeRun(PROBE, True, runs=1)]
    return report


def _add_facts_of_the_run(
    report: Report, target: RankTarget, missing: set[str], returned: set[str], changed: Mapping[str, list[int]]
) -> None:
    """Findings that need no numbers: results that no rank returns, and inputs that some ranks wrote to."""
    label = report.cases[0]
    texts = {n: f"no rank returns {n}; returned: {listed(sorted(returned))}" for n in sorted(missing)}
    for n, ranks in changed.items():
        if n not in target.mutates:
            where = ranks_text(ranks)
            texts[n] = f"the candidate writes to its input {n} on {where}; copy it first, or declare mutates=({n!r},)"
    if texts and report.verdict != REFERENCE_FAULT:
        report.verdict = FAIL
    kept = [f for f in report.findings if not (f.probe == PROBE and f.tensor in missing)]
    report.findings = [*(Finding(CERTAIN, PROBE, n, None, None, None, text, label) for n, text in texts.items()), *kept]
    facts = report.environment["ranks"]
    facts["causes"] = [cause for cause in facts["causes"] if cause["tensor"] not in missing]


def calls(
    target: RankTarget, step: PlainStep, pool: RankGroup, mesh: Mapping[str, int], *, fill: bool
) -> list[RankCall]:
    """What every rank has to do."""
    placements = {n: step.placed(n) for n in (*step.inputs, *step.names) if n in step.inputs or not target.dtensors}
    placements |= {n: step.placed(n) for n in target.placements if target.dtensors}
    return [
        RankCall(
            target.candidate if target.load is None else None, target.load, target.outputs, target.dtensors,
            pool.device, dict(mesh),
            {n: part(t, step.placed(n), at, step.sizes) for n, t in step.inputs.items()},
            step.scalars,
            {n: (tuple(t.shape), tuple(t.stride())) for n, t in step.inputs.items()},
            step.grads,
            {n: part(g, step.placed(f"grad_{n}"), at, step.sizes) for n, g in step.cotangents.items()},
            placements,
            fill,
        )
        for at in coordinates(step.sizes)
    ]  # fmt: skip


class _Judge:
    """One case: the ranks' tensors against the golden, then against edited goldens."""

    def __init__(
        self, target: RankTarget, step: PlainStep, runs: Callable[[bool], dict[str, list[Tensor | None]]], seed: int,
        label: str,
    ) -> None:  # fmt: skip
        self.target, self.step, self.seed, self.label = target, step, seed, label
        self.parts, self._runs = runs(True), runs

    def unfilled(self) -> dict[str, list[Tensor | None]]:
        """The ranks' tensors of a run that leaves unwritten memory as it comes; none if a rank fails now."""
        try:
            return self._runs(False)
        except RankError:
            return {}

    def report(self) -> Report:
        absent = [n for n, tensors in self.parts.items() if any(t is None for t in tensors)]
        first = (0,) * len(self.step.sizes)
        try:
            views_of = {
                n: views(self._present(n), self.step.placed(n), self.step.sizes) for n in self.parts if n not in absent
            }
        except RuntimeError as error:  # of torch.cat, which names the sizes
            text = f"the ranks' parts do not fit together as `placements` say: {error}"
            return self._failed([Finding(CERTAIN, PROBE, "", None, None, None, text, self.label)])
        if views_of:
            report = self._checked(
                {n: self._whole(n, first) for n in views_of}, lambda v: _chosen(self.step(v), views_of)
            )
        else:
            report = self._failed([])
        if report.verdict == REFERENCE_FAULT:
            return report
        wrong = {n: [first] for n in absent}
        bad = {f.tensor for f in report.findings}
        for name, at in views_of.items():
            places = [first] if name in bad else []
            for view in at[1:]:
                other = self._checked({name: self._whole(name, view)}, lambda v, n=name: {n: self.step(v)[n]})  # type: ignore[misc]
                places += [] if other.ok else [view]
                report.findings += [] if name in bad else other.findings
            if places:
                wrong[name] = places
        rank_findings = explain(self.step, self.parts, wrong, self._proves, self.unfilled) if wrong else []
        explained = {f.tensor for f in rank_findings}
        rank_findings += [
            RankFinding("gradient_on_one_rank", n, f"no rank has {n}", True) for n in absent if n not in explained
        ]
        if wrong:
            report.verdict = FAIL
        self._add(report, [dataclasses.replace(f, case=self.label) for f in rank_findings])
        return report

    def _add(self, report: Report, rank_findings: list[RankFinding]) -> None:
        """Proven causes become findings; a hypothesis is added to the tensor's first finding."""
        for each in rank_findings:
            at = next((i for i, f in enumerate(report.findings) if f.tensor == each.tensor), None)
            if not each.proven and at is not None:
                old = report.findings[at]
                report.findings[at] = dataclasses.replace(old, text=f"{old.text}\n{each}")
        proven = [
            Finding(CERTAIN, PROBE, f.tensor, None, None, None, str(f), self.label) for f in rank_findings if f.proven
        ]
        report.findings = [*proven, *report.findings]
        report.environment["ranks"] = {"causes": [f.to_json() for f in rank_findings]}

    def _failed(self, findings: list[Finding]) -> Report:
        dtypes = {str(t.dtype).removeprefix("torch.") for t in self.step.inputs.values() if t.is_floating_point()}
        return Report(
            self.target.name or "", FAIL, findings=findings, cases=[self.label], dtypes=sorted(dtypes),
            environment={"ranks": {"causes": []}},
        )  # fmt: skip

    def _present(self, name: str) -> list[Tensor]:
        return [t for t in self.parts[name] if t is not None]

    def _whole(self, name: str, view: Coordinates) -> Tensor:
        return assembled(self._present(name), self.step.placed(name), self.step.sizes, view)

    def _proves(self, name: str, view: Coordinates, golden: Callable[[Values], Tensor]) -> bool:
        return self._checked({name: self._whole(name, view)}, lambda v: {name: golden(v)}).ok

    def _checked(self, values: Mapping[str, Tensor], golden: Callable[[Values], Mapping[str, Tensor]]) -> Report:
        """The assay's report on these whole tensors, whatever computed them."""
        inner = {n: n.replace(".grad", "_gradient") for n in values}

        def candidate(**supplied: object) -> dict[str, Tensor]:
            return {inner[n]: t.clone() for n, t in values.items()}

        def renamed(**supplied: object) -> dict[str, Tensor]:
            results = golden(supplied)
            return {inner[n]: results[n] for n in values}

        drawn = dict(self.step.values)
        case = Case(self.label, lambda make: drawn, given=True)
        decisions = {inner[n]: d for n, d in self.target.decisions.items() if n in inner}
        one = Target(
            candidate, renamed, cases=[case], name=self.target.name, backward=None, decisions=decisions,
            compute=self.target.compute, dot=self.target.dot,
        )  # fmt: skip
        report, _ = examine(one, [case], None, "cpu", self.seed, catalogue.select(PROBES), None)
        outer = {short: name for name, short in inner.items()}
        report.findings = [_renamed(f, outer) for f in report.findings]
        report.rows = [dataclasses.replace(r, tensor=outer.get(r.tensor, r.tensor)) for r in report.rows]
        return report


def _renamed(finding: Finding, names: Mapping[str, str]) -> Finding:
    """The finding with the name that users know, "x.grad", for "x_gradient"."""
    name = names.get(finding.tensor, finding.tensor)
    text = finding.text.replace(finding.tensor, name) if finding.tensor else finding.text
    return dataclasses.replace(finding, tensor=name, text=text)


def _chosen(results: Mapping[str, Tensor], names: Mapping[str, object]) -> dict[str, Tensor]:
    return {n: results[n] for n in names}


def _joined(target: RankTarget, reports: Sequence[Report]) -> Report:
    """All cases in one report."""
    if not reports:
        raise TargetError(f"cases: {target.name} has no cases")
    verdicts = [r.verdict for r in reports]
    order = (FAIL, REFERENCE_FAULT, PASS, UNJUDGED)
    whole = Report(target.name or "", next(v for v in order if v in verdicts), environment=dict(reports[0].environment))
    whole.environment["ranks"] = {
        **reports[0].environment["ranks"],
        "causes": [cause for r in reports for cause in r.environment["ranks"]["causes"]],
    }
    for r in reports:
        whole.findings += r.findings
        whole.notes += r.notes
        whole.rows += r.rows
        whole.cases += r.cases
        whole.dtypes += [d for d in r.dtypes if d not in whole.dtypes]
        whole.probes += [p for p in r.probes if p.name not in {q.name for q in whole.probes}]
        whole.maps |= r.maps
        whole.seconds += r.seconds
        whole.seed = r.seed
    return whole
