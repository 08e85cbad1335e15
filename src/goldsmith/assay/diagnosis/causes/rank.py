"""Ranks causes by the rules and by known faults that look similar; empty if nothing is wrong.

A sure rule stays first. All other causes are ordered by their likelihood, to which the rules contribute. So related
causes follow, and if no rule matches there is still a weak guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ...report.results import QUALITY, REFERENCE_FAULT
from ..facts.evidence import Evidence
from . import rules
from .features import features
from .likelihood import SURE, learned, likelihoods, strongest_statements
from .rules.reading import Match, Reading

FILE = Path(__file__).with_name("calibration.json")
WEAK = 0.3
LEAST = 0.05  # causes below this score are not listed
MOST = 6  # causes listed, at most
FIRST, OTHER = "first", "other"  # positions of a cause, each with its own calibration
Calibration = Mapping[str, Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Cause:
    """One explanation of the fault.

    id        of the catalogue
    score     in [0, 1]: share of causes in this position, with this likelihood, that were right on kernels left out of
              the fit
    tensor    the first wrong tensor
    evidence  sentences with numbers
    params    data of the rule: {"input": "x", "axis": 1, "missing": [32, 128]}
    text      the sentence; mend: the likely repair, or the next experiment
    edit      the edit of the golden that gives exactly the candidate's numbers, here and on another draw; "" if none
    """

    id: str
    score: float
    tensor: str
    evidence: list[str]
    params: dict[str, object] = field(default_factory=dict)
    text: str = ""
    mend: str = ""
    edit: str = ""

    @property
    def weak(self) -> bool:
        return self.score < WEAK

    @property
    def likely(self) -> bool:
        """True if the cause is a guess: no edit proves it, and its score says that such causes are often wrong."""
        return self.guessed or not self.edit and self.score < SURE

    @property
    def headline(self) -> str:
        """What is proven, in one sentence: the edit, a sure cause, or only the wrong tensor."""
        if self.edit:
            return f"{self.tensor} is wrong: the golden gives it when {self.edit}"
        if self.likely:
            return f"{self.tensor} is wrong; not explained" if self.tensor else "not explained"
        return self.text

    @property
    def guess(self) -> str:
        """A likely cause, with the share of such causes that were right on known faults."""
        known = rules.CATALOGUE[self.id].text if self.id in rules.CATALOGUE else self.text
        return f"{100 * self.score:.0f} %  {self.id}: {known}"

    @property
    def guessed(self) -> bool:
        """True if no rule shows this cause, and only similar known faults suggest it."""
        return bool(self.params.get("learned"))


def rank(evidence: Evidence, calibration: Calibration | None = None) -> list[Cause]:
    """Causes, the best first. Empty if nothing is wrong: ties and other notes are not faults.

    If the golden is at fault, that is the only cause. If no rule matches and there are no numbers, the only cause is
    `unknown`, with the evidence. With a calibration, only the rules order the causes, and only it gives the scores.
    """
    report = evidence.report
    if report.verdict == REFERENCE_FAULT:
        match = rules.CATALOGUE[rules.REFERENCE_FAULT].rule(Reading(evidence))
        return [_cause(rules.REFERENCE_FAULT, match, 1.0, "")] if match is not None else []
    if report.ok:
        return []
    matches = rules.matches(evidence)
    raw = {id: match.score for id, match in matches.items()}
    chances = likelihoods(evidence, matches) if calibration is None else {}
    if chances:
        out = Reading(evidence).ruled_out - set(matches)
        chances = {id: chance for id, chance in chances.items() if id not in out}
        order, points = ordered(raw, chances)[:MOST], learned()["points"]
    else:
        chances, order = raw, sorted(raw, key=lambda id: -raw[id])
        points = _calibration() if calibration is None else calibration
    causes, highest, edits = [], 1.0, _edits(evidence)
    for place, id in enumerate(order):
        match = matches.get(id) or _guessed(evidence, id)
        chance = calibrated(OTHER if place else FIRST, chances[id], points)
        if chances is not raw and place == 0 and match.params.get("observed"):
            chance = match.score
        highest = min(highest, chance)
        causes.append(_cause(id, match, highest, evidence.first_wrong or evidence.tensor, edits.get(id, "")))
    return [c for c in causes if c.score >= LEAST] or [_unknown(evidence)]


def by_rules(evidence: Evidence) -> str:
    """The cause that the rules alone put first."""
    return next((c.id for c in rank(evidence, {})), "")


def ordered(matches: Mapping[str, float], chances: Mapping[str, float]) -> list[str]:
    """Causes, the best first: one whose rule is sure, then by likelihood. matches: raw scores."""
    best = max(matches, key=lambda id: matches[id], default="")
    return sorted(chances, key=lambda id: (id != best or matches[id] < SURE, -chances[id]))


def _guessed(evidence: Evidence, id: str) -> Match:
    """A match for a cause that no rule shows; `common`: what it has in common with similar known faults."""
    findings = [f.text for f in evidence.report.findings if f.rung != QUALITY][:3]
    common = strongest_statements(features(evidence), id)
    return Match(0.0, tuple(findings), {"learned": True, "common": common})


def strength(evidence: Evidence | None) -> float:
    """Score of the strongest match before calibration; 0 without a match."""
    return 0.0 if evidence is None else max((m.score for m in rules.matches(evidence).values()), default=0.0)


def calibrated(place: str, raw: float, table: Calibration) -> float:
    """The share of right answers at that raw score and position, interpolated linearly between the points.

    Without points, the raw score.
    """
    points = table.get(place)
    raw = min(max(raw, 0.0), 1.0)
    if not points:
        return raw
    before, after = points[0], points[-1]
    for low, high in zip(points, points[1:], strict=False):
        if low[0] <= raw <= high[0]:
            before, after = low, high
            break
    if raw <= before[0] or after[0] == before[0]:
        return float(before[1])
    if raw >= after[0]:
        return float(after[1])
    return float(before[1] + (after[1] - before[1]) * (raw - before[0]) / (after[0] - before[0]))


@cache
def _calibration() -> Calibration:
    """{FIRST or OTHER: [[raw score, share of right answers], ...]}, ascending; empty if it was never measured."""
    return json.loads(FILE.read_text(encoding="utf-8"))["points"] if FILE.exists() else {}


def _edits(evidence: Evidence) -> dict[str, str]:
    """Cause -> the first edit of the golden with this label that gives the whole tensor exactly."""
    edits: dict[str, str] = {}
    for what in evidence.whatif:
        if what.exact and what.whole and what.tensor == (evidence.first_wrong or evidence.tensor):
            for id in (what.cause, *what.also):
                edits.setdefault(id, what.text)
    return edits


def _cause(id: str, match: Match, score: float, tensor: str, edit: str = "") -> Cause:
    entry = rules.CATALOGUE[id]
    text = f"{tensor} is wrong: {entry.text}" if tensor else entry.text
    return Cause(id, round(score, 4), tensor, list(match.sentences), dict(match.params), text, entry.mend, edit)


def displayed_causes(causes: Sequence[Cause]) -> list[Cause]:
    """The causes to display: behind a cause that a rule shows, only one guess. The data keep all."""
    if not causes or causes[0].guessed:
        return list(causes)
    guesses = [c for c in causes if c.guessed]
    return [c for c in causes if not c.guessed or c is guesses[0]]


def _unknown(evidence: Evidence) -> Cause:
    findings = [f.text for f in evidence.report.findings if f.rung != QUALITY]
    entry = rules.CATALOGUE[rules.UNKNOWN]
    tensor = evidence.first_wrong or evidence.tensor
    text = f"{tensor} is wrong: {entry.text}" if tensor else entry.text
    return Cause(rules.UNKNOWN, 0.0, tensor, findings[:8], {}, text, entry.mend)
