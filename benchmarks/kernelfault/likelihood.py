"""Fits the model of `goldsmith.assay.diagnosis.causes.likelihood`: a softmax with a penalty, judged batch by batch.

    minimise  - sum_i share_i sum_c t_ic log p(c | i) + penalty / 2 * |weights|^2,  t_i: accepted causes, in equal parts

An example is a fault with its features and the causes that the rules named. For a stranger's batch these are the causes
before any rule was improved on it (benchmarks/results/kernelfault_strangers_*.json); for our own faults, the causes of
today. Held-out kernels are never fitted on. Figures are of examples outside the fit: held-out kernels, and each
stranger's batch in turn. benchmarks/kernelfault/features.jsonl keeps the examples, so that a fit needs no new runs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from . import catalogue

RESULTS = catalogue.ROOT / "benchmarks" / "results"
FEATURES = catalogue.ROOT / "benchmarks" / "kernelfault" / "features.jsonl"
FILE = catalogue.ROOT / "src" / "goldsmith" / "assay" / "diagnosis" / "causes" / "likelihood.json"
FIRST_SIGHT = "kernelfault_strangers_*.json"
OURS, HELD = "ours", "held out"
PENALTY = 2.0
SEEN_SHARE = 0.5  # weight of an example that rules were improved on: their answers to it are too good
RARE = 3  # a statement must be true of at least this many examples
_RAW = {"sure": 1.0, "likely": 0.7, "weak": 0.3, "behind": 0.2, "far behind": 0.1}
_CAUSES_LEFT = {"unknown", "reference_fault"}


@dataclass(frozen=True)
class Example:
    """A known fault: its kernel and batch, accepted causes and features, and the causes that the rules named.

    rules  cause -> how strongly the rules named it
    top    the causes in the order that they were printed
    """

    name: str
    host: str
    batch: str
    causes: tuple[str, ...]
    features: frozenset[str]
    rules: dict[str, str]
    top: tuple[str, ...]


def keep(rows: Iterable[dict]) -> int:
    """Write the features of these rows to the file, in place of older ones; returns their number."""
    known = {f.key: f for f in catalogue.faults()}
    old = {entry["name"]: entry for entry in _read()}
    new = {}
    for row in rows:
        fault = known.get(row.get("fault", ""))
        if fault is None or not fault.counted or not row.get("features") or row["seed"] or fault.key in new:
            continue
        seen = {"features": row["features"], "raw": row["raw"]}
        new[fault.key] = {"name": fault.key, "host": fault.host.name, **seen}
    FEATURES.write_text("".join(json.dumps(e) + "\n" for _, e in sorted((old | new).items())), encoding="utf-8")
    return len(new)


def _read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FEATURES.read_text(encoding="utf-8").splitlines()] if FEATURES.exists() else []


def examples() -> list[Example]:
    """All kept examples whose fault is still in the catalogue, with the catalogue's truth."""
    known = {f.key: f for f in catalogue.faults()}
    seen, batches = first_sight()
    out = []
    for entry in _read():
        if entry["name"] not in known:
            continue
        raw = dict(entry["raw"])
        top = tuple(sorted(raw, key=lambda id: -raw[id]))
        if entry["name"] in seen:
            top, strengths = _rule_answers(seen[entry["name"]], raw)
        else:
            strengths = _strengths_of(raw)
        fault = known[entry["name"]]
        batch = HELD if fault.host.held_out else batches.get(entry["host"], OURS)
        out.append(Example(fault.key, entry["host"], batch, fault.causes, frozenset(entry["features"]), strengths, top))
    return out


def first_sight() -> tuple[dict[str, list[list[Any]]], dict[str, str]]:
    """({fault: [[cause, score], ...] at first sight}, {kernel: batch})."""
    seen: dict[str, list[list[Any]]] = {}
    batches: dict[str, str] = {}
    for path in sorted(RESULTS.glob(FIRST_SIGHT)):
        content = json.loads(path.read_text(encoding="utf-8"))
        misses = {miss["fault"]: miss["said"] for miss in content["misses"]}
        for fault in content["by_fault"]:
            key = f"{fault['id']} {fault['host']} {fault['backend']}"
            batches[fault["host"]] = path.stem.rpartition("_")[2]
            seen[key] = misses.get(key, [[id, None] for id in list(fault["said"])[:1]])
    return seen, batches


def _rule_answers(first: list[list[Any]], raw: dict[str, float]) -> tuple[tuple[str, ...], dict[str, str]]:
    """(causes in the printed order, {cause: strength}); a first cause without a score gets its strength of today."""
    likely = _model()
    ranked = [(id, score) for id, score in first if id not in _CAUSES_LEFT]
    strengths = {id: "behind" if score is None or score >= 0.1 else "far behind" for id, score in ranked[1:]}
    for id, score in ranked[:1]:
        best = max(raw, key=lambda c: raw[c], default=id)
        now = raw.get(id, 1.0) if best == id else 1.0
        sure, some = (
            (likely.SURE, likely.LIKELY) if score is None else (0.9, 0.4)
        )  # calibrated scores, as they were printed
        strength = now if score is None else score
        strengths[id] = "sure" if strength >= sure else "likely" if strength >= some else "weak"
    return tuple(id for id, _ in ranked), strengths


def _strengths_of(raw: dict[str, float]) -> dict[str, str]:
    return _model().rule_strengths({id: score for id, score in raw.items() if id not in _CAUSES_LEFT})


def _model() -> Any:
    from goldsmith.assay.diagnosis.causes import likelihood

    return likelihood


def _causes() -> list[str]:
    from goldsmith.assay.diagnosis.causes.rules import CATALOGUE

    return [id for id in CATALOGUE if id not in _CAUSES_LEFT]


def fitted(training: Sequence[Example], penalty: float = PENALTY) -> dict[str, Any]:
    """{"base": {cause: w}, "weights": {statement: {cause: w}}, "rules": {strength: w}}"""
    import torch

    likely, causes = _model(), _causes()
    true = [likely.statements(e.features, e.rules) for e in training]
    count = Counter(s for names in true for s in names)
    names = sorted(s for s, n in count.items() if n >= RARE)
    at, place = {s: i for i, s in enumerate(names)}, {c: i for i, c in enumerate(causes)}
    x = torch.zeros(len(training), len(names), dtype=torch.float64)
    strength_flags = torch.zeros(len(training), len(causes), len(likely.STRENGTHS), dtype=torch.float64)
    wanted = torch.zeros(len(training), len(causes), dtype=torch.float64)
    for i, (e, seen) in enumerate(zip(training, true, strict=True)):
        x[i, [at[s] for s in seen if s in at]] = 1.0
        for id, how in e.rules.items():
            strength_flags[i, place[id], likely.STRENGTHS.index(how)] = 1.0
        for id in e.causes:
            wanted[i, place[id]] = 1.0 / len(e.causes)
    share = torch.tensor([SEEN_SHARE if e.batch == OURS else 1.0 for e in training], dtype=torch.float64)
    base = torch.zeros(len(causes), dtype=torch.float64, requires_grad=True)
    weights = torch.zeros(len(names), len(causes), dtype=torch.float64, requires_grad=True)
    strength_weights = torch.zeros(len(likely.STRENGTHS), dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([base, weights, strength_weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        search.zero_grad()
        log = torch.log_softmax(base + x @ weights + strength_flags @ strength_weights, 1)
        far = weights.square().sum() + 0.1 * base.square().sum() + 0.01 * strength_weights.square().sum()
        value = -((wanted * log).sum(1) * share).sum() + penalty / 2 * far
        value.backward()
        return value

    search.step(loss)
    learned_weights = weights.detach()
    return {
        "base": {c: round(float(v), 2) for c, v in zip(causes, base.detach(), strict=True)},
        "weights": {
            s: {
                c: round(float(learned_weights[i, k]), 2)
                for c, k in place.items()
                if abs(float(learned_weights[i, k])) >= 0.015
            }
            for s, i in at.items()
        },
        "rules": {s: round(float(v), 2) for s, v in zip(likely.STRENGTHS, strength_weights.detach(), strict=True)},
    }


def ranking(model: dict[str, Any], e: Example) -> list[tuple[str, float]]:
    """[(cause, chance)] of an example, in the order of `rank`."""
    from goldsmith.assay.diagnosis.causes.rank import ordered

    likely = _model()
    chances = likely.probabilities(model, likely.statements(e.features, e.rules), e.rules)
    raw = {id: _RAW[how] for id, how in e.rules.items()}
    return [(id, chances[id]) for id in ordered(raw, chances)]


def left_out(training: Sequence[Example], penalty: float = PENALTY) -> list[tuple[Example, list[tuple[str, float]]]]:
    """[(example, its ranking)] of strangers' batches, each by a model that was fitted without that batch."""
    out = []
    for batch in sorted({e.batch for e in training} - {OURS, HELD}):
        model = fitted([e for e in training if e.batch not in (batch, HELD)], penalty)
        out += [(e, ranking(model, e)) for e in training if e.batch == batch]
    return out


def shares(answers: Sequence[tuple[Example, list[tuple[str, float]]]]) -> dict[str, float]:
    """Shares of right answers, ranked first and among the first three: by the rules, and by the model."""
    n = max(1, len(answers))
    return {
        "first": sum(bool(set(e.top[:1]) & set(e.causes)) for e, _ in answers) / n,
        "among 3": sum(bool(set(e.top[:3]) & set(e.causes)) for e, _ in answers) / n,
        "first, learned": sum(order[0][0] in e.causes for e, order in answers) / n,
        "among 3, learned": sum(bool({id for id, _ in order[:3]} & set(e.causes)) for e, order in answers) / n,
        "log loss": sum(-math.log(max(1e-9, sum(p for id, p in order if id in e.causes))) for e, order in answers) / n,
    }


def write() -> str:
    """Fit, and write likelihood.json with scores from left-out batches; returns lines for the terminal."""
    from . import calibration

    training = examples()
    result = left_out(training)
    pairs: dict[str, list[tuple[float, bool]]] = {calibration.FIRST: [], calibration.OTHER: []}
    for e, order in result:
        for place, (id, chance) in enumerate(order[:6]):
            pairs[calibration.OTHER if place else calibration.FIRST].append((round(chance, 2), id in e.causes))
    model = fitted([e for e in training if e.batch != HELD])
    points = {place: calibration.isotonic(seen) for place, seen in pairs.items() if seen}
    count = sum(e.batch != HELD for e in training)
    _written({"about": _ABOUT, "examples": count, "points": points, **model})
    held_out_answers = [(e, ranking(model, e)) for e in training if e.batch == HELD]
    batches = Counter(e.batch for e in training)
    lines = [f"{FILE.relative_to(catalogue.ROOT)}: examples {dict(sorted(batches.items()))}"]
    for name, part in (
        (f"each batch left out in turn, {len(result)} faults", result),
        (f"{HELD}, {len(held_out_answers)}", held_out_answers),
    ):
        lines.append(f"  {name}: " + ", ".join(f"{k} {v:.3f}" for k, v in shares(part).items()))
    lines.append(f"  first causes with a score of at least 0.9: {_sure(result, points)}")
    return "\n".join(lines)


def _sure(answers: Sequence[tuple[Example, list[tuple[str, float]]]], points: dict[str, Any]) -> str:
    """How many first causes score at least 0.9, and how many of these are right."""
    from goldsmith.assay.diagnosis.causes.rank import calibrated

    from . import calibration

    right = [o[0][0] in e.causes for e, o in answers if calibrated(calibration.FIRST, o[0][1], points) >= 0.9]
    return f"{sum(right)} of {len(right)} right"


def _written(model: dict[str, Any]) -> None:
    """Write the file with a line per statement, so that diffs stay small."""
    lines = []
    for key, value in model.items():
        inside = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()] if isinstance(value, dict) else []
        whole = "{\n  " + ",\n  ".join(inside) + "\n }" if inside else json.dumps(value)
        lines.append(f" {json.dumps(key)}: {whole}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


_ABOUT = (
    "weights of statements about a wrong result for each cause, and scores: chance -> share of right answers on "
    "batches left out; written by `python -m benchmarks.kernelfault --fit`"
)


if __name__ == "__main__":
    print(write())
