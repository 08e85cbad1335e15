"""Figures of the rows: rates with 95 % intervals, the confusion matrix, and misses with their evidence."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from ..intervals import wilson
from . import catalogue
from .baseline_names import RULES
from .catalogue import Fault

AUTHOR = "Faults by one author are not an estimate of how often bugs occur, nor of which ones do."
NONE = "(none)"


def rate(hits: int, n: int) -> dict[str, Any]:
    """{"hits", "of", "share", "low", "high"}"""
    interval = wilson(hits, n)
    low, high = (None, None) if interval is None else interval
    return {"hits": hits, "of": n, "share": hits / n if n else None, "low": low, "high": high}


def loads(rows: Iterable[dict]) -> list[float]:
    """[lowest, highest] load average of the machine when rows ended."""
    seen = [r["load"] for r in rows if "load" in r]
    return [min(seen), max(seen)] if seen else []


def judged(row: dict, fault: Fault) -> dict[str, bool]:
    """Which parts of its fault's truth a row got right."""
    ids = [c["id"] for c in row["causes"]]
    right = [c for c in row["causes"] if c["id"] in fault.causes]
    return {
        "detected": row["verdict"] in ("fail", "died"),
        "stage": row["stage"] in fault.stages,
        "top1": bool(ids) and ids[0] in fault.causes,
        "top3": any(id in fault.causes for id in ids[:3]),
        "params": bool(right) and all(_agrees(right[0]["params"], k, v, row["sizes"]) for k, v in fault.params.items()),
    }


def _agrees(params: dict, key: str, wanted: Any, sizes: dict) -> bool:
    """Whether a cause's params agree with the truth, whose numbers and index sets use the names of sizes."""
    got = params.get(key)
    if key == "missing":
        return got == [[_number(lo, sizes), _number(hi, sizes)] for lo, hi in wanted]
    if key == "times":
        numbers = [v for v in params.values() if isinstance(v, int | float)]
        return any(math.isclose(v, _number(wanted, sizes), rel_tol=1e-3) or math.isclose(v + 1, _number(wanted, sizes))
                   for v in numbers)  # fmt: skip
    return wanted in str(got) or any(wanted in str(a) for a in params.get("also", ()))


def _number(text: str, sizes: dict) -> float:
    """The value of a product of sizes and numbers: "n * n", "D", "32"."""
    return math.prod(sizes[part] if part in sizes else float(part) for part in text.split(" * "))


def summarise(rows: Iterable[dict]) -> dict[str, Any]:
    """Every figure of the rows, by the truth of the present catalogue."""
    known = {f.key: f for f in catalogue.faults()}
    rows = list(rows)
    clean = [r for r in rows if r.get("kind") == "clean"]
    twins = [r for r in rows if r.get("kind") == "twin"]
    of_faults = [(r, known[r["fault"]]) for r in rows if r.get("kind") == "fault" and r["fault"] in known]
    counted = [(r, f) for r, f in of_faults if f.counted]
    groups: dict[str, Callable[[Fault], bool]] = {
        "all": lambda f: True,
        "development": lambda f: not f.host.held_out,
        "held out": lambda f: f.host.held_out,
        "by a stranger": lambda f: f.host.author != catalogue.OURS,
    }
    for backend in sorted({f.backend for _, f in counted}):
        groups[backend] = lambda f, backend=backend: f.backend == backend
    return {
        "author": AUTHOR,
        "rates": {name: _rates([(r, f) for r, f in counted if wanted(f)]) for name, wanted in groups.items()},
        "accused": _accused(of_faults),
        "clean": _alarms(clean),
        "twins": _alarms(twins),
        "by_fault": _by_fault(of_faults),
        "equivalent": [{"fault": f.key, "why": f.equivalent} for f in known.values() if f.equivalent],
        "confusion": _confusion(counted),
        "misses": _misses(counted),
        "alarms": [r for r in clean + twins if r["verdict"] != "pass"][:50],
        "cost": _cost(twins),
        "report": _report(counted),
        "baselines": _baselines(counted, of_faults, twins),
        "calibration": _calibration(counted),
    }


def _rates(pairs: list[tuple[dict, Fault]]) -> dict[str, Any]:
    judgements = [judged(r, f) for r, f in pairs]
    detailed = [j["params"] for (_, f), j in zip(pairs, judgements, strict=True) if f.params]
    out = {k: rate(sum(j[k] for j in judgements), len(judgements)) for k in ("detected", "stage", "top1", "top3")}
    out["params"] = rate(sum(detailed), len(detailed))
    return {"faults": len({f.key for _, f in pairs}), "hosts": len({f.host.name for _, f in pairs}), **out}


def _accused(pairs: list[tuple[dict, Fault]]) -> dict[str, Any]:
    """Right kernels among the faults (ties, faulty goldens, rewritings): how many were accused."""
    right = [(r, f) for r, f in pairs if f.verdict != "fail"]
    wrong = [
        {"fault": f.key, "case": r["case"], "seed": r["seed"], "verdict": r["verdict"], "notes": r["notes"]}
        for r, f in right
        if r["verdict"] != f.verdict or (f.note and f.note not in r["notes"])
        or any(c["id"] != "reference_fault" for c in r["causes"])
    ]  # fmt: skip
    return {**rate(len(wrong), len(right)), "rows": wrong}


def _alarms(rows: list[dict]) -> dict[str, Any]:
    return rate(sum(r["verdict"] != "pass" for r in rows), len(rows))


def _by_fault(pairs: list[tuple[dict, Fault]]) -> list[dict[str, Any]]:
    grouped: dict[str, list[tuple[dict, Fault]]] = defaultdict(list)
    for r, f in pairs:
        grouped[f.key].append((r, f))
    out = []
    for members in grouped.values():
        f = members[0][1]
        judgements = [judged(r, f) for r, _ in members]
        tops = Counter((r["causes"] or [{"id": NONE}])[0]["id"] for r, _ in members)
        out.append({
            "id": f.id, "host": f.host.name, "backend": f.backend, "what": f.what, "held_out": f.host.held_out,
            "verdict": f.verdict, "stages": list(f.stages), "causes": list(f.causes), "rows": len(members),
            "right_verdict": sum(r["verdict"].replace("died", "fail") == f.verdict for r, _ in members),
            "amended": f.amended,
            **{k: sum(j[k] for j in judgements) for k in ("detected", "stage", "top1", "top3")},
            "said": dict(tops.most_common(3)),
        })  # fmt: skip
    return out


def _confusion(pairs: list[tuple[dict, Fault]]) -> dict[str, dict[str, int]]:
    """{true cause: {first cause: rows}}; every accepted cause counts as the true one."""
    out: dict[str, Counter] = defaultdict(Counter)
    for r, f in pairs:
        first = r["causes"][0]["id"] if r["causes"] else NONE
        out[f.causes[0]][f.causes[0] if first in f.causes else first] += 1
    return {truth: dict(firsts) for truth, firsts in sorted(out.items())}


def _misses(pairs: list[tuple[dict, Fault]]) -> list[dict[str, Any]]:
    out = []
    for r, f in pairs:
        j = judged(r, f)
        if not (j["detected"] and j["stage"] and j["top1"]):
            out.append({
                "fault": f.key, "case": r["case"], "seed": r["seed"], "what": f.what, "held_out": f.host.held_out,
                "missed": next(k for k in ("detected", "stage", "top1") if not j[k]), "top3": j["top3"],
                "stage": r["stage"], "wanted_stage": list(f.stages), "wanted": list(f.causes),
                "said": [[c["id"], c["score"]] for c in r["causes"][:4]],
                "evidence": (r.get("sentences") or r["findings"] or [r.get("died", "")])[:2],
            })  # fmt: skip
    return out


def _cost(twins: list[dict]) -> dict[str, Any]:
    """Median cost of the parts of a check on right kernels, in seconds and in runs of the kernel."""
    out: dict[str, Any] = {}
    for part in ("plain", "compare", "stages", "all"):
        seconds = [r["cost"][part] for r in twins if "cost" in r]
        ratios = [r["cost"][part] / r["cost"]["plain"] for r in twins if r.get("cost", {}).get("plain")]
        if seconds:
            out[part] = {"seconds": statistics.median(seconds), "runs": statistics.median(ratios)}
    return out


def _report(pairs: list[tuple[dict, Fault]]) -> dict[str, Any]:
    seconds = sorted(r["seconds"] for r, f in pairs if r["verdict"] == "fail")
    shares = []
    for r, _ in pairs:
        if r.get("small") and r.get("sizes"):
            whole = math.prod(max(v, 1) for v in r["sizes"].values())
            small = math.prod(max(r["small"].get(k, v), 1) for k, v in r["sizes"].items())
            shares.append(small / whole)
    if not seconds:
        return {}
    return {
        "median_seconds": statistics.median(seconds), "p90_seconds": seconds[int(0.9 * (len(seconds) - 1))],
        "small": statistics.median(shares) if shares else None,
        "partial": sum(bool(r.get("partial")) for r, _ in pairs),
    }  # fmt: skip


def _baselines(
    counted: list[tuple[dict, Fault]], of_faults: list[tuple[dict, Fault]], twins: list[dict]
) -> dict[str, Any]:
    """{rule: rates of rejected faults and rejected right kernels}, where the rule applies."""
    right = [r for r in twins if "baselines" in r]
    right += [r for r, f in of_faults if f.verdict == "pass" and "baselines" in r]
    passes = {(r["host"], r["backend"], r["case"], r["seed"], n): not v for r in twins for n, v in
              r.get("baselines", {}).items() if v is not None}  # fmt: skip
    out = {}
    for rule in RULES:
        rows = [r for r, _ in counted if r.get("baselines", {}).get(rule) is not None]
        if rule == "gradcheck":  # right float32 kernels fail it too, so those say nothing
            rows = [r for r in rows if passes.get((r["host"], r["backend"], r["case"], r["seed"], rule))]
        answers = [r["baselines"][rule] for r in right if r["baselines"].get(rule) is not None]
        if rows or answers:
            out[rule] = {
                "faults": rate(sum(r["baselines"][rule] for r in rows), len(rows)),
                "right_kernels": rate(sum(answers), len(answers)),
            }
    return out


def _calibration(pairs: list[tuple[dict, Fault]]) -> dict[str, Any]:
    """[score, share right, rows] of first causes, for development and held-out faults."""
    out = {}
    for name, held_out in (("development", False), ("held out", True)):
        bins: dict[float, list[bool]] = defaultdict(list)
        for r, f in pairs:
            if f.host.held_out == held_out and r["causes"]:
                top = r["causes"][0]
                bins[min(math.floor(top["score"] * 10) / 10, 0.9)].append(top["id"] in f.causes)
        out[name] = [[low, sum(v) / len(v), len(v)] for low, v in sorted(bins.items())]
    return out
