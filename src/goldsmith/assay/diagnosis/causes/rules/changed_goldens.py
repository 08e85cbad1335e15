"""Merges the changed goldens, which give the exact numbers, into the matches of the rules."""

from __future__ import annotations

from ...facts.evidence import Evidence, WhatIf
from .reading import EXACT, SEEN, Match

_BEST, _PART, _NEAR = 0.97, 0.85, 0.75
_SURE = 0.985  # two kinds of evidence agree
_CAP = 0.8  # limit for rules that only look at numbers, if a change gives these numbers
_MOVED = "shifted"
_LOOKS = frozenset(
    """truncated_reduction off_by_one wrong_mask wrong_axis overwritten_accumulator lost_update missing_rescale
    low_precision_accumulation missing_term repeated_term sign_flip wrong_factor scale_bias transposed permuted shifted
    wrong_stride swapped_results wrong_format missing_partition mask_shift single_element absolute_eps overflow
    wrong_saved_tensor invalid_index truncating_store index_overflow missing_max_shift dropout_mismatch""".split()
)


def merged(evidence: Evidence, matches: dict[str, Match]) -> dict[str, Match]:
    """The rules' matches and those of the changes. A change that gives all numbers outranks a rule about them."""
    if not evidence.whatif:
        return matches
    best = evidence.whatif[0]
    out = dict(matches)
    if best.exact and best.whole:
        named = {w.cause for w in evidence.whatif}
        out = {
            id: Match(min(m.score, _CAP), m.sentences, m.params) if id in _LOOKS - named and not _simple(id, m) else m
            for id, m in out.items()
        }
        if evidence.tensor.startswith("saved.") and "wrong_saved_tensor" in matches:
            out["wrong_saved_tensor"] = matches["wrong_saved_tensor"]
    saved = evidence.tensor.startswith("saved.") and not _computed(evidence, best)
    if evidence.tensor.startswith("saved.") and not saved and "wrong_saved_tensor" in out:
        rule_match = out["wrong_saved_tensor"]
        out["wrong_saved_tensor"] = Match(min(rule_match.score, _CAP), rule_match.sentences, rule_match.params)
    most = _PART if saved else 1.0  # that another tensor was saved matters more than how it was computed
    for what in reversed(evidence.whatif):
        match = _match(what, best, evidence.whatif, most)
        before = out.get(what.cause)
        if before is not None and what.cause in matches and before.score >= EXACT and what.exact and what.whole:
            match = Match(min(_SURE, max(match.score, before.score) + 0.02), match.sentences, match.params)
        if before is not None and before.score > match.score:
            match = Match(before.score, (*before.sentences, match.sentences[0]), {**match.params, **before.params})
        elif before is not None and what.cause in matches:
            match = Match(match.score, (*match.sentences, *before.sentences[:2]), {**before.params, **match.params})
        out[what.cause] = match
    for what in evidence.whatif:
        match = _match(what, best, evidence.whatif, most)
        for place, id in enumerate(what.also):
            if what.exact and (id not in out or out[id].score < _CAP):
                text = f"the same change, under another name: {match.sentences[0]}"
                out[id] = Match(match.score - 0.1 - 0.02 * place, (text,), match.params)
            elif what.exact and what.whole and id == _MOVED and id in matches and matches[id].score >= EXACT:
                # the whole tensor is visibly the golden's, shifted: which bound or index did it is a guess
                rule_match = matches[id]
                score = min(_SURE, max(match.score, rule_match.score) + 0.01)
                out[id] = Match(
                    score, (*rule_match.sentences, match.sentences[0]), {**match.params, **rule_match.params}
                )
    if _redrawn(evidence, matches, best):
        mask, change = matches["dropout_mismatch"], out[best.cause]
        out[best.cause] = Match(min(change.score, _CAP), change.sentences, change.params)
        out["dropout_mismatch"] = Match(_SURE, (*mask.sentences, change.sentences[0]), change.params)
    return out


_DRAWS = frozenset("rand rand_like randn bernoulli bernoulli_ uniform uniform_ native_dropout randint randperm".split())


def _redrawn(evidence: Evidence, matches: dict[str, Match], best: WhatIf) -> bool:
    """True if a gradient has another random mask: a seed that is off by one is not an off-by-one bound."""
    mask = matches.get("dropout_mismatch")
    drawn = evidence.tensor.endswith(".grad") and bool(evidence.operators & _DRAWS)
    return drawn and best.exact and best.whole and mask is not None and mask.score >= SEEN


_REARRANGED = frozenset("permuted shifted transposed swapped_results wrong_saved_tensor wrong_stride".split())


def _computed(evidence: Evidence, best: WhatIf) -> bool:
    """True if the saved tensor is neither another one nor reordered, but its own formula with a mistake."""
    formula = best.cause not in _REARRANGED and "function" not in best.params
    return best.exact and best.whole and formula and not evidence.alike


def _simple(id: str, match: Match) -> bool:
    """True for a rearrangement of the whole tensor: as exact as a change inside, and simpler."""
    return match.score >= 0.95 and id in ("transposed", "permuted", "shifted", "swapped_results")


def _match(what: WhatIf, best: WhatIf, all: list[WhatIf], most: float) -> Match:
    score = (
        (_NEAR if not what.exact else _BEST if what.whole else _PART)
        - 0.3 * max(0.0, best.prior - what.prior)
        - 0.02 * (1 - what.others)
    )
    sentence = f"the golden makes this {what.tensor} when {what.text} (R^2 {what.match:.6f})"
    also = [w.text for w in all if w is not what and w.cause == what.cause]
    sentences = (sentence, f"cannot be distinguished from: {'; '.join(also[:3])}") if also else (sentence,)
    return Match(min(score, most), sentences, {**what.params, "also": also[:6]})
