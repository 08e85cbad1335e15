"""The content of a diagnosis page without markup: the story, the data of the pictures, and the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ...report.html import svg, view
from ...report.html.maps import map_view
from ...report.html.strip import UNNAMED_WORD
from ...report.results import FAIL, PASS, REFERENCE_FAULT, ErrorMap
from ..causes.rank import displayed_causes
from ..facts.spans import say
from .result import FAILED, NOT_RUN, PASSED, REFUSED, DiagnosisFacts

if TYPE_CHECKING:
    from ..causes.rank import Cause
    from ..facts.evidence import Evidence, RunFact, StageState

STATE_WORD = {
    "ok": "right",
    "culprit": "wrong on right inputs",
    "inherited": "wrong by inheritance",
    "observed": "wrong, not isolated",
    "not judged": "not judged",
}
CELLS = 96  # along a side of a map


@dataclass(frozen=True)
class Story:
    """The top of the page: verdict, what is wrong, where, the evidence, and what to try."""

    verdict: str
    headline: str
    where: str = ""
    why: tuple[str, ...] = ()
    score: str = ""
    mend: str = ""


def story(diagnosis: DiagnosisFacts) -> Story:
    name = diagnosis.report.target or "the target"
    if diagnosis.verdict == PASS:
        partial = f" ({diagnosis.partial})" if diagnosis.partial else ""
        return Story("partial" if diagnosis.partial else PASS, f"Nothing wrong was found in {name}{partial}.")
    if diagnosis.verdict == REFERENCE_FAULT:
        why = tuple(diagnosis.causes[0].evidence[:3]) if diagnosis.causes else (view.headline(diagnosis.report),)
        return Story(REFERENCE_FAULT, f"The reference is at fault, so {name} is not accused.", why=why)
    if diagnosis.verdict != FAIL:
        return Story("partial", view.headline(diagnosis.report))
    where = diagnosis.location.text if diagnosis.location is not None else ""
    if diagnosis.first_wrong_stage and where:
        where = f"{diagnosis.first_wrong_stage}: {where}"
    if diagnosis.patch is not None and diagnosis.first_wrong_stage:
        mended = view.sentence(f"{diagnosis.first_wrong_stage} is wrong: {diagnosis.patch.headline}")
        return Story(FAIL, mended, where, tuple(diagnosis.causes[0].evidence[:3]) if diagnosis.causes else ())
    if not diagnosis.causes:
        return Story(FAIL, view.headline(diagnosis.report), where)
    best = diagnosis.causes[0]
    if best.likely:
        return Story(FAIL, view.sentence(best.headline), where, tuple(best.evidence[:3]))
    return Story(FAIL, view.sentence(best.headline), where, tuple(best.evidence[:3]), scored(best), best.mend)


def scored(cause: Cause) -> str:
    return f"{cause.id}, {'weak, ' if cause.weak else ''}score {cause.score:.2f}"


def strip(diagnosis: DiagnosisFacts) -> list[dict[str, str]]:
    """One box for each stage in the golden's order: right, wrong by inheritance, or wrong on right inputs."""
    elsewhere = diagnosis.faults_of_other_runs()
    first = diagnosis.first_wrong_stage
    return [
        {
            "name": stage.name,
            "kind": stage.kind,
            "state": "bad" if stage.name in elsewhere else stage.state,
            "word": _word(stage, "first wrong" if stage.name == first else "", elsewhere.get(stage.name, "")),
            "glyph": svg.glyph("bad" if stage.name in elsewhere else stage.state),
            "first": "first" if stage.name == first else "",
        }
        for stage in diagnosis.stages
    ]


def stages(diagnosis: DiagnosisFacts) -> list[tuple[StageState, str]]:
    """The table of stages, each with a remark on its state."""
    elsewhere = diagnosis.faults_of_other_runs()
    return [(s, f"but wrong in {elsewhere[s.name]}" if s.name in elsewhere else s.text) for s in diagnosis.stages]


def _word(stage: StageState, first: str, elsewhere: str) -> str:
    if elsewhere:
        return f"{first or 'wrong'} in {elsewhere}"
    if first:
        return first
    if stage.state == "not judged" and stage.propagated is None:
        return UNNAMED_WORD
    return STATE_WORD.get(stage.state, stage.state)


def causes(diagnosis: DiagnosisFacts) -> list[dict[str, Any]]:
    return [
        {
            "cause": cause,
            "bar": svg.score(cause.score, f"score {cause.score:.2f}"),
            "params": ", ".join(f"{k} {_plain(v)}" for k, v in _details(cause)),
        }
        for cause in displayed_causes(diagnosis.causes)
    ]


def _details(cause: Cause) -> list[tuple[str, object]]:
    """The parameters of a cause that its text and its tensor do not say already."""
    return [
        (k, v)
        for k, v in cause.params.items()
        if v not in (None, "", [], ()) and k != "learned" and not (k == "tensor" and v == cause.tensor)
    ]


def _plain(value: object) -> str:
    if isinstance(value, float):
        return view.number(value)
    return ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)


# pictures


def maps(diagnosis: DiagnosisFacts) -> list[dict[str, object]]:
    """The map of the first wrong tensor, then maps of other tensors that the check found wrong in that case."""
    drawn: list[ErrorMap] = [diagnosis.map] if diagnosis.map is not None else []
    known = {m.tensor for m in drawn}
    drawn += [m for m in view.shown_maps(diagnosis.report, 3).values() if m.bad and m.tensor not in known]
    return [map_view(m, CELLS) for m in drawn if view.pictured(m)]


def case_table(diagnosis: DiagnosisFacts) -> list[tuple[str, str, str]]:
    """(name, result, glyph) of each case; empty for a single one, which the page names anyway."""
    outcomes = diagnosis.case_outcomes()
    states = {PASSED: "ok", FAILED: "bad", REFUSED: "not judged", NOT_RUN: "absent"}
    return (
        [(name, outcome, svg.glyph(states[outcome])) for name, outcome in outcomes.items()] if len(outcomes) > 1 else []
    )


def dependence(diagnosis: DiagnosisFacts) -> list[dict[str, object]]:
    """Where the candidate depends on other slices of an input than the golden does."""
    influence = diagnosis.evidence.influence if diagnosis.evidence is not None else {}
    out = []
    for fact in influence.values():
        length = _length(diagnosis, fact.input, fact.axis, [hi for _, hi in (*fact.missing, *fact.extra)])
        missing = ((0, length - 1),) if fact.none else fact.missing
        reached = view.join(list(fact.outputs)) or "the result"
        sentences = []
        if missing:
            sentences.append(f"{say(missing)} should reach {reached}, but does not")
        if fact.extra:
            sentences.append(f"{say(fact.extra)} reaches {reached}, but should not")
        name = f"{fact.input}, axis {fact.axis}"
        out.append(
            {
                "name": name,
                "length": length,
                "said": "; ".join(sentences),
                "golden": svg.depends(length, fact.extra, (), f"{name}: what the golden depends on"),
                "candidate": svg.depends(length, missing, fact.extra, f"{name}: what the candidate depends on"),
            }
        )
    return out


def _length(diagnosis: DiagnosisFacts, name: str, axis: int, ends: Sequence[int]) -> int:
    shape = diagnosis.examined.get("shapes", {}).get(name, ())
    return shape[axis] if axis < len(shape) else max([*ends, 0]) + 1


# tables


def runs(diagnosis: DiagnosisFacts) -> list[dict[str, str]]:
    """Other runs of the same case; consecutive runs with the same result share a line."""
    facts = list(diagnosis.evidence.runs.values()) if diagnosis.evidence is not None else []
    lines = []
    for (kind, outcome, bits), group in groupby(facts, key=lambda r: (r.name.rstrip("0123456789 "), *_outcome(r))):
        members = list(group)
        name = (
            members[0].name
            if len(members) == 1
            else f"{members[0].name} to {members[-1].name.removeprefix(kind).strip()}"
        )
        lines.append({"name": name, "outcome": outcome, "bits": bits, "state": "ok" if members[0].right else "bad"})
    return lines


def _outcome(run: RunFact) -> tuple[str, str]:
    if run.error:
        return f"raised {run.error}", ""
    outcome = "right" if run.right else f"{view.join(list(run.wrong), 4)} wrong"
    return outcome, "the same" if run.same else f"up to {view.number(run.difference)} apart"


def changed_goldens(evidence: Evidence | None) -> list[dict[str, str]]:
    """Changes of one line of the golden that give the candidate's numbers; the best first."""
    return [
        {
            "text": answer.text,
            "cause": answer.cause,
            "tensor": answer.tensor,
            "explains": "every element"
            if answer.exact and answer.whole
            else f"{100 * answer.match:.5g} % of the error",
            "others": f"{100 * answer.others:.3g} %",
        }
        for answer in (evidence.whatif if evidence is not None else [])
    ]


def case_rows(diagnosis: DiagnosisFacts) -> list[tuple[str, str]]:
    """The data that reproduce the smallest failing case."""
    case = diagnosis.case
    if not case:
        return []
    rows = [("case", str(case["name"]))]
    if diagnosis.examined and diagnosis.examined["name"] != case["name"]:
        rows.append(("found in", str(diagnosis.examined["name"])))
    rows.append(
        ("drawn", f"{case['dtype']} on {case['device']}, seed {case['seed']}, {view.count(case['threads'], 'thread')}")
    )
    if case.get("steps"):
        rows.append(("reduced by", "; ".join(map(str, case["steps"]))))
    if case.get("strides"):
        rows.append(("strides", "; ".join(f"{n} {tuple(s)}" for n, s in case["strides"].items())))
    return rows


def details(diagnosis: DiagnosisFacts) -> view.Section:
    """The check's own section without the parts that the page already shows."""
    section = view.section(
        view.Entry(diagnosis.report.target or "the target", report=diagnosis.report), max_rows=120, map_cells=CELLS
    )
    return replace(section, strip=[], maps=[])
