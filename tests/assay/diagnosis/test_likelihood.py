"""Statements about a case, and the model that ranks causes by them and by the rules."""

import math
from dataclasses import replace

import pytest
import torch

from assay.diagnosis.faulty import draw, pair, report
from goldsmith.assay.diagnosis.causes import likelihood, rank
from goldsmith.assay.diagnosis.causes.features import features
from goldsmith.assay.diagnosis.causes.patched import with_patch
from goldsmith.assay.diagnosis.causes.rank import Cause
from goldsmith.assay.diagnosis.causes.rules import CATALOGUE, matches
from goldsmith.assay.diagnosis.facts.evidence import Evidence, Influence, RunFact
from goldsmith.assay.diagnosis.source.patch import Equal, Patch

G = draw(12, 10)


def later(factor):
    got = G.clone()
    got[8:] *= factor
    return got


@pytest.mark.parametrize(
    "got, true, untrue",
    [
        (later(0.5), "to the end", "from the beginning"),
        (later(0), "zeros there", "alike"),
        (-G, "opposite", "alike"),
        (G * 1.01, "small errors", "errors of its size"),
        (torch.where(G == G.max(), torch.inf, G), "holds Inf", "holds NaN"),
    ],
)
def test_statements_about_a_wrong_result(got, true, untrue):
    seen = features(pair(got, G))
    assert true in seen and untrue not in seen, sorted(seen)


def test_statements_about_other_runs_and_influence():
    cut = Influence("x", 0, missing=((8, 11),), outputs=("y",), length=12)
    runs = {"flat": RunFact("flat"), "scale 2^-12": RunFact("scale 2^-12", wrong=("y",))}
    seen = features(pair(later(0.5), G, influence={"x[0]": cut}, runs=runs, operators=frozenset(["index_add_"])))
    assert {"missing to the end", "right in flat", "golden has scatters", "a forward result"} <= seen
    assert not {"right at scale 2^-12", "influence extra", "a gradient"} & seen


# the model

TOY = {
    "base": {"missing_term": 0.0, "wrong_mask": 1.0, "race": 3.0},
    "weights": {"all wrong": {"missing_term": 2.0, "race": 1.0}, "first is wrong_mask": {"wrong_mask": 0.5}},
    "rules": dict.fromkeys(likelihood.STRENGTHS, 0.0) | {"sure": 4.0},
    "points": {"first": [[0.0, 0.1], [1.0, 0.9]], "other": [[0.0, 0.0], [1.0, 0.6]]},
}


def test_likelihoods_are_the_softmax_of_true_statements():
    result = likelihood.probabilities(TOY, frozenset(["all wrong", "never heard of"]), {})
    assert list(result) == ["missing_term", "wrong_mask"] and sum(result.values()) == pytest.approx(1)
    assert result["missing_term"] == pytest.approx(math.exp(2) / (math.exp(2) + math.exp(1)))


def test_a_cause_with_a_mark_is_not_guessed_without_its_rule():
    assert "race" not in likelihood.probabilities(TOY, frozenset(["all wrong"]), {})
    assert next(iter(likelihood.probabilities(TOY, frozenset(["all wrong"]), {"race": "weak"}))) == "race"
    assert set(CATALOGUE) > likelihood.MARKED and not likelihood.MARKED & {
        "missing_term",
        "wrong_factor",
        "lost_update",
    }


def test_strengths_of_rules():
    text = likelihood.rule_strengths({"shifted": 0.7, "wrong_mask": 0.95, "race": 0.2})
    assert text == {"wrong_mask": "sure", "shifted": "behind", "race": "far behind"}
    assert likelihood.rule_strengths({"shifted": 0.5}) == {"shifted": "likely"} and likelihood.rule_strengths(
        {"race": 0.1}
    ) == {"race": "weak"}
    assert likelihood.statements(frozenset(["a block"]), text) == {"a block", "first is wrong_mask"}
    assert likelihood.statements(frozenset(), {"race": "weak"}) == {likelihood.NO_SURE_RULE}


def test_a_sure_rule_stays_first_and_others_follow_by_likelihood():
    chances = {"missing_term": 0.6, "wrong_mask": 0.3, "race": 0.1}
    assert rank.ordered({"race": 0.95, "wrong_mask": 0.97}, chances) == ["wrong_mask", "missing_term", "race"]
    assert rank.ordered({"wrong_mask": 0.75}, chances) == ["missing_term", "wrong_mask", "race"]


def test_without_a_matching_rule_there_is_a_guess_marked_as_such():
    evidence = pair(G + draw(12, 10, seed=4), G)
    assert not any(match.score >= likelihood.LIKELY for match in matches(evidence).values())
    causes = rank.rank(evidence)
    guessed = [c for c in causes if c.params.get("learned")]
    assert len(causes) >= 3 and causes[0].score < 0.6 and guessed
    assert all(c.likely and c.headline == "y is wrong; not explained" for c in guessed)
    assert not {c.id for c in guessed} & set(likelihood.MARKED)
    assert [c.score for c in causes] == sorted((c.score for c in causes), reverse=True)
    assert all(c.guess.startswith(f"{100 * c.score:.0f} %  {c.id}: ") for c in guessed)
    assert evidence.report.findings[0].text in guessed[0].evidence
    assert [c.id for c in rank.rank(evidence, {})] == ["unknown"] or not guessed[0].id == rank.by_rules(evidence)


def test_without_numbers_nothing_is_guessed():
    assert likelihood.likelihoods(Evidence(report=report(), tensor="y"), {}) == {}


def test_errors_of_mere_rounding_are_not_guessed_at():
    assert likelihood.likelihoods(pair(G + 1e-7 * draw(12, 10, seed=4), G), {}) == {}
    assert likelihood.likelihoods(pair(G + 1e-3 * draw(12, 10, seed=4), G), {})


def test_the_fit_helps_with_kernels_that_were_left_out():
    """`python -m benchmarks.kernelfault --fit` fits over all batches; here only the last one is left out."""
    from benchmarks.kernelfault import likelihood as learn

    examples = learn.examples()
    left = [e for e in examples if e.batch == "6"]
    model = learn.fitted([e for e in examples if e.batch not in ("6", learn.HELD)])
    shares = learn.shares([(e, learn.ranking(model, e)) for e in left])
    assert len(left) > 50 and shares["among 3, learned"] >= shares["among 3"] + 0.1, shares
    assert shares["first, learned"] >= shares["first"], shares


@pytest.mark.parametrize(
    ("kind", "removed", "added", "cause"),
    [
        ("sign", "y = a + b", "y = a - b", "sign_flip"),
        ("assignment", "y = a", "y += a", "overwritten_accumulator"),
        ("function", "y.index_copy_(0, i, a)", "y.index_add_(0, i, a)", "lost_update"),
        ("call removed", "y = f(a)", "y = a", "wrong_stride"),  # the edit alone does not tell
        ("factor added", "for i in range(n):", "for i in range(n * m):", "truncated_reduction"),
        ("plus or minus one", "y = tl.load(p + row * n)", "y = tl.load(p + row * n + 1)", "invalid_index"),
        ("another name", "y = tl.load(p, mask=a)", "y = tl.load(p, mask=b)", "wrong_mask"),
        ("sign", "y = a[n - 1]", "y = a[n + 1]", "invalid_index"),
        ("number, made contiguous", "y = 1", "y = 2\n+y = y.contiguous()", "wrong_stride"),  # the copy does not tell
        ("sign, made contiguous", "y = a + b", "y = a - b\n+y = y.contiguous()", "sign_flip"),
    ],
)
def test_the_cause_that_a_patch_undoes_comes_first(kind, removed, added, cause):
    patch = Patch("k.py", 1, kind, f"--- k.py\n+++ k.py\n@@ -1 +1 @@\n-{removed}\n+{added}", 2)
    if ", " in kind:
        patch = replace(patch, joins=tuple(kind.split(", ")))
    guesses = [Cause(id, score, "y", ["a fact"]) for id, score in (("wrong_stride", 0.34), ("sign_flip", 0.2))]
    ranked = with_patch(guesses, patch, "y")
    assert ranked[0].id == cause and {c.id for c in guesses} <= {c.id for c in ranked}
    sure = [Cause("overrun", 0.97, "y", ["40 bytes written past the end"]), *guesses]
    assert with_patch(sure, patch, "y") == sure
    assert with_patch(guesses, replace(patch, narrow=True), "y") == guesses
    other = Equal(1, "number", "-y = 1\n+y = 2")  # another mend that passes as well
    assert with_patch(guesses, replace(patch, equals=(other,)), "y") == guesses
