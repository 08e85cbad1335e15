"""The learned probability of each cause, from the features of a case and the matches of the rules.

    p(cause) = softmax(base[cause] + sum over true statements of weights[statement][cause] + rules[its rule's strength])

`python -m benchmarks.kernelfault --fit` fits the weights on known faults. For faults written by strangers it uses the
rules' matches at first sight. It stores the weights in likelihood.json next to this file. A score is the share of right
answers at that p on kernels that are held out of the fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..facts.evidence import Evidence
from .features import features
from .rules.reading import Match, Reading

FILE = Path(__file__).with_name("likelihood.json")
# Lowest raw scores. The first rule is sure from SURE and likely from LIKELY; the others are close behind from BEHIND.
SURE, LIKELY, BEHIND = 0.9, 0.45, 0.6
ROUNDINGS = 64 * 2.0**-23  # 64 times float32's distance from 1 to the next number
STRENGTHS = ("sure", "likely", "weak", "behind", "far behind")
NO_SURE_RULE = "no rule says much"
# Every run looks for the evidence of these causes, so they are not guessed unless their rule matched.
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


def statements(case_features: frozenset[str], strengths: Mapping[str, str]) -> frozenset[str]:
    """The input of the model: the features of the case, and one statement about the cause that the rules put first."""
    first = next(
        (f"first is {id}" for id, strength in strengths.items() if strength in ("sure", "likely")), NO_SURE_RULE
    )
    return case_features | {first}


def likelihoods(evidence: Evidence, matches: Mapping[str, Match]) -> dict[str, float]:
    """Cause -> probability, the likeliest first; empty without a model, without results, or if errors are tiny."""
    model = learned()
    if not model or evidence.got is None or _rounded(evidence):
        return {}
    strengths = rule_strengths({id: match.score for id, match in matches.items()})
    return probabilities(model, statements(features(evidence), strengths), strengths)


def _rounded(evidence: Evidence) -> bool:
    """Whether no error exceeds ROUNDINGS times the largest number; wrong masks, indices and factors do so."""
    reading = Reading(evidence)
    if (
        reading.y is None
        or reading.g is None
        or not reading.plain_wrong
        or not bool((reading.y.isfinite() & reading.g.isfinite()).all())
    ):
        return False
    return (
        float((reading.y - reading.g).abs().amax()) <= ROUNDINGS * float(reading.g.abs().amax())
        if reading.y.numel()
        else False
    )


def probabilities(model: Mapping[str, Any], true: frozenset[str], strengths: Mapping[str, str]) -> dict[str, float]:
    """The softmax above, the likeliest cause first; causes in MARKED only if their rule matched."""
    total = {id: value for id, value in model["base"].items() if id in strengths or id not in MARKED}
    for statement in true:
        for id, weight in model["weights"].get(statement, {}).items():
            if id in total:
                total[id] += weight
    for id, strength in strengths.items():
        if id in total:
            total[id] += model["rules"][strength]
    top = max(total.values())
    shares = {id: math.exp(value - top) for id, value in total.items()}
    normaliser = sum(shares.values())
    return {id: share / normaliser for id, share in sorted(shares.items(), key=lambda item: -item[1])}


def strongest_statements(true: frozenset[str], id: str, most: int = 3) -> list[str]:
    """The true statements with the largest weights for a cause."""
    weights = {s: learned().get("weights", {}).get(s, {}).get(id, 0.0) for s in true}
    order = sorted(weights, key=lambda s: -weights[s])
    return [s for s in order[:most] if weights[s] > 0.05 and s != NO_SURE_RULE and not s.startswith("first is ")]


@cache
def learned() -> dict[str, Any]:
    """{"base": {cause: w}, "weights": {statement: {cause: w}}, "rules": {strength: w}, "points": ...}, or {}."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
