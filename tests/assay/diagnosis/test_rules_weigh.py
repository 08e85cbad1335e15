"""How much a story is worth: what else would look alike, and how much of what is wrong it explains."""

from dataclasses import replace

import pytest

from assay.diagnosis.fault_table import G
from assay.diagnosis.faulty import draw, pair
from goldsmith.assay.diagnosis.evidence import Influence, RunFact
from goldsmith.assay.diagnosis.rank import rank


def scored(id, evidence):
    return next((c.score for c in rank(evidence, {}) if c.id == id), 0.0)


def test_an_epsilon_is_not_blamed_where_large_inputs_hide_what_is_wrong():
    runs = {"scale 2^12": RunFact("scale 2^12"), "scale 2^-12": RunFact("scale 2^-12", wrong=("y",))}
    evidence = pair(G * 1.01 + 0.01 * draw(12, 16, seed=9), G, runs=runs, fits=[], ratios=[])
    assert scored("absolute_eps", evidence) > 0.9
    assert scored("absolute_eps", replace(evidence, operators=frozenset({"_softmax"}))) < 0.4
    raised = {**runs, "scale 2^-12": RunFact("scale 2^-12", error="IndexError: index -1 is out of bounds")}
    assert scored("absolute_eps", replace(evidence, runs=raised)) == 0


@pytest.mark.parametrize("reached, claimed", [(1.0, True), (0.2, False)])
def test_a_bound_is_blamed_for_all_that_is_wrong_or_for_nothing(reached, claimed):
    extra = Influence("a", 1, extra=((16, 16),), outputs=("y",), length=40, reached=reached)
    evidence = pair(G + draw(12, 16, seed=9), G, influence={"a[1]": extra}, fits=[], ratios=[])
    assert (scored("off_by_one", evidence) > 0.8) == claimed
    lost = Influence("a", 1, ((8, 15),), outputs=("y",), length=40, reached=reached)
    evidence = pair(G + draw(12, 16, seed=9), G, influence={"a[1]": lost}, fits=[], ratios=[])
    assert (scored("truncated_reduction", evidence) > 0.8) == claimed


def test_the_second_of_two_replaces_the_first():
    lost = Influence("gate", 1, ((0, 0),), outputs=("y",), length=2)
    found = rank(pair(G + draw(12, 16, seed=9), G, influence={"gate[1]": lost}, fits=[], ratios=[]), {})
    assert found[0].id == "overwritten_accumulator"


def test_scores_that_are_alike_hide_more_than_a_rescaling():
    small = {"scale 2^-12": RunFact("scale 2^-12"), "scale 2^12": RunFact("scale 2^12", wrong=("y",))}
    evidence = pair(G + draw(12, 16, seed=9), G, runs=small, fits=[], ratios=[])
    evidence = replace(evidence, operators=frozenset({"_softmax"}))
    assert 0 < scored("missing_rescale", evidence) <= 0.4
    near = replace(evidence, got=G * (1 + 2.0**-22), fits=[], ratios=[])
    assert scored("missing_rescale", near) == 0
