"""A diagnosis prints nothing twice, and few guesses after a cause that a rule shows; the data keep all."""

import torch

from goldsmith import assay
from goldsmith.assay.diagnosis.causes.rank import Cause, displayed_causes
from goldsmith.assay.diagnosis.causes.rules.reading import once


def guess(id):
    return Cause(id, 0.1, "y", ["no rule shows this"], {"learned": True})


def test_sentences_do_not_repeat_one_another():
    second = "the second call gives another result: 20 of 20 elements differ, by up to {} (second_call)"
    assert once([second.format(0.25), second.format(0.227)]) == [second.format(0.25)]
    where = "where such inputs never come, exclude them by where= of the case (values:offset)"
    sentences = once([f"y has Inf: every element; {where}", f"x.grad has NaN: every element; {where}"])
    assert sentences == ["y has Inf: every element", f"x.grad has NaN: every element; {where}"]
    assert once(["y is wrong: axis 0: 1; worst at [1]", "z is wrong: axis 0: 1; worst at [2]"]) == [
        "y is wrong: axis 0: 1; worst at [1]",
        "z is wrong: axis 0: 1; worst at [2]",
    ]


def test_growing_state_is_reported_once():
    calls = [0]

    def kernel(x):
        calls[0] += 1
        return x * (1 + (calls[0] - 1) * 0.1)

    diagnosis = assay.diagnose(assay.Target(kernel, lambda x: x * 1.0, cases={"x": torch.randn(4, 5)}))
    assert diagnosis.causes[0].id == "stale_state", str(diagnosis)
    assert " ".join(diagnosis.causes[0].evidence).count("the second call with the same inputs") == 1, str(diagnosis)


def test_only_one_guess_follows_a_cause_that_a_rule_shows():
    real, other = Cause("sign_flip", 0.9, "y", ["seen"]), Cause("shifted", 0.2, "y", ["seen, too"])
    some = [real, guess("race"), other, guess("permuted"), guess("overrun")]
    assert [c.id for c in displayed_causes(some)] == ["sign_flip", "race", "shifted"]
    assert displayed_causes([guess("race"), guess("permuted"), real]) == [guess("race"), guess("permuted"), real]
    assert displayed_causes([]) == []


def test_the_data_keep_every_guess():
    @assay.case(N=[12], D=[7])
    def rows(make, N, D):
        return {"x": make.normal(N, D)}

    def kernel(x):
        return assay.stage("s", 0.9573 * x.std(0, keepdim=True))

    diagnosis = assay.diagnose(assay.Target(kernel, lambda x: assay.stage("s", x.std(0, keepdim=True)), cases=rows))
    guesses = [c for c in diagnosis.to_json()["causes"] if c["params"].get("learned")]
    shown = [c for c in displayed_causes(diagnosis.causes) if c.guessed]
    assert len(guesses) > 1 and len(shown) == 1, str(diagnosis)
