"""The learned probability of each cause, from what a case looks like and what the rules say of it.

    p(cause) = softmax(base[cause] + sum over true statements of weight[statement][cause] + said[strength of its rule])

`python -m benchmarks.kernelfault --fit` fits the weights on known faults, with the answers from when each fault was
first seen, and stores them in likelihood.json beside this file. A score is the share of right answers at that p on
kernels left out of the fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .evidence import Evidence
from .features import features
from .rules.reading import Match, Reading

FILE = Path(__file__).with_name("likelihood.json")
# raw scores from which a rule counts as sure, as likely, and (behind the first place) as close behind
SURE, LIKELY, BEHIND = 0.9, 0.45, 0.6
ROUNDINGS = 64 * 2.0**-23  # of float32
STRENGTHS = ("sure", "likely", "weak", "behind", "far behind")
SILENT = "no rule says much"
# Causes that leave a mark which every run looks for: without their rule they are not guessed.
MARKED = frozenset(
    """never_written not_computed uninitialised_accumulator low_precision_accumulation scale_bias dtype_width
    layout_assumption expanded_gradient overrun stray_read aliased input_modified use_after_free stale_state stale_copy
    stale_config race missing_sync overflow nan_swallowed truncating_store index_overflow wrong_decision
    dropout_mismatch empty_group single_element exception bad_config""".split()
)


def rule_strengths(matches: Mapping[str, float]) -> dict[str, str]:
    """Cause -> strength of its rule, from the rules' raw scores."""
    order = sorted(matches.items(), key=lambda item: -item[1])
    strengths = {id: "behind" if score >= BEHIND else "far behind" for id, score in order[1:]}
    for id, score in order[:1]:
        strengths[id] = "sure" if score >= SURE else "likely" if score >= LIKELY else "weak"
    return strengths


def statements(seen: frozenset[str], strengths: Mapping[str, str]) -> frozenset[str]:
    """The input of the model: what the case looks like, and the cause that the rules put first."""
    first = next((f"first is {id}" for id, how in strengths.items() if how in ("sure", "likely")), SILENT)
    return seen | {first}


def likelihoods(evidence: Evidence, matches: Mapping[str, Match]) -> dict[str, float]:
    """Cause -> probability, the likeliest first; empty without a model or without numbers."""
    model = learned()
    if not model or evidence.got is None or _rounded(evidence):
        return {}
    strengths = rule_strengths({id: match.score for id, match in matches.items()})
    return chances(model, statements(features(evidence), strengths), strengths)


def _rounded(evidence: Evidence) -> bool:
    """True if no error exceeds some roundings of the largest number: no mask, index or factor does that."""
    r = Reading(evidence)
    if r.y is None or r.g is None or not r.plain_wrong or not bool((r.y.isfinite() & r.g.isfinite()).all()):
        return False
    return float((r.y - r.g).abs().amax()) <= ROUNDINGS * float(r.g.abs().amax()) if r.y.numel() else False


def chances(model: Mapping[str, Any], true: frozenset[str], strengths: Mapping[str, str]) -> dict[str, float]:
    """The softmax above, the likeliest cause first; a cause with a mark of its own only if a rule saw it."""
    total = {id: value for id, value in model["base"].items() if id in strengths or id not in MARKED}
    for statement in true:
        for id, weight in model["weights"].get(statement, {}).items():
            if id in total:
                total[id] += weight
    for id, how in strengths.items():
        if id in total:
            total[id] += model["said"][how]
    top = max(total.values())
    shares = {id: math.exp(value - top) for id, value in total.items()}
    whole = sum(shares.values())
    return {id: share / whole for id, share in sorted(shares.items(), key=lambda item: -item[1])}


def strongest_statements(true: frozenset[str], id: str, most: int = 3) -> list[str]:
    """The true statements with the largest weights for a cause."""
    weights = {s: learned().get("weights", {}).get(s, {}).get(id, 0.0) for s in true}
    order = sorted(weights, key=lambda s: -weights[s])
    return [s for s in order[:most] if weights[s] > 0.05 and s != SILENT and not s.startswith("first is ")]


@cache
def learned() -> dict[str, Any]:
    """{"base": {cause: w}, "weights": {statement: {cause: w}}, "said": {strength: w}, "points": ...}, or {}."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
