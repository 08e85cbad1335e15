"""Scores of rules depend on what else would look the same, and on how much of the error they explain."""

import math
from dataclasses import replace

import pytest

from assay.diagnosis.fault_table import G
from assay.diagnosis.faulty import draw, pair
from goldsmith.assay.diagnosis.causes.rank import rank
from goldsmith.assay.diagnosis.facts.evidence import Influence, MemoryFact, RunFact, WhatIf
from goldsmith.assay.report.results import Location


def scored(id, evidence):
    return next((c.score for c in rank(evidence, {}) if c.id == id), 0.0)


def test_an_epsilon_is_not_blamed_if_large_inputs_hide_the_fault():
    runs = {"scale 2^12": RunFact("scale 2^12"), "scale 2^-12": RunFact("scale 2^-12", wrong=("y",))}
    evidence = pair(G * 1.01 + 0.01 * draw(12, 16, seed=9), G, runs=runs, ratios=[])
    assert scored("absolute_eps", evidence) > 0.9
    assert scored("absolute_eps", replace(evidence, operators=frozenset({"_softmax"}))) == 0
    raised = {**runs, "scale 2^-12": RunFact("scale 2^-12", error="IndexError: index -1 is out of bounds")}
    assert scored("absolute_eps", replace(evidence, runs=raised)) == 0


@pytest.mark.parametrize("reached, claimed", [(1.0, True), (0.2, False)])
def test_a_bound_is_blamed_only_if_it_explains_all_wrong_elements(reached, claimed):
    extra = Influence("a", 1, extra=((16, 16),), outputs=("y",), length=40, reached=reached)
    evidence = pair(G + draw(12, 16, seed=9), G, influence={"a[1]": extra}, ratios=[])
    assert (scored("off_by_one", evidence) > 0.8) == claimed
    lost = Influence("a", 1, ((8, 15),), outputs=("y",), length=40, reached=reached)
    evidence = pair(G + draw(12, 16, seed=9), G, influence={"a[1]": lost}, ratios=[])
    assert (scored("truncated_reduction", evidence) > 0.8) == claimed


def test_the_second_of_two_replaces_the_first():
    lost = Influence("gate", 1, ((0, 0),), outputs=("y",), length=2)
    causes = rank(pair(G + draw(12, 16, seed=9), G, influence={"gate[1]": lost}, ratios=[]), {})
    assert causes[0].id == "overwritten_accumulator"


def test_a_transposed_golden_is_called_transposed_whatever_was_exchanged():
    golden = draw(9, 9)
    exchanged = WhatIf("swapped_results", "q and k are exchanged", "y", 1.0, True, prior=0.75)
    causes = rank(pair(golden.mT.clone(), golden, whatif=[exchanged]), {})
    assert [c.id for c in causes[:2]] == ["transposed", "swapped_results"]


@pytest.mark.parametrize("also, first", [(("shifted",), "shifted"), ((), "off_by_one")])
def test_a_shifted_golden_is_called_shifted_if_the_change_allows_it(also, first):
    golden = draw(9, 6)
    bound = WhatIf("off_by_one", "each group begins one place late", "y", 1.0, True, prior=0.5, also=also)
    assert rank(pair(golden.roll(1, 0), golden, whatif=[bound]), {})[0].id == first
    other = replace(bound, cause="shifted", text="an index is one too high", also=(), prior=0.4)
    causes = rank(pair(draw(9, 6, seed=3), golden, ratios=[], whatif=[bound, other]), {})
    assert [c.id for c in causes[:2]] == ["off_by_one", "shifted"]  # no rule that looks at the numbers says so


def test_alternative_names_of_a_change_stay_behind_it_for_saved_tensors():
    stride = WhatIf("wrong_stride", "a stride is half as long", "saved.h", 1.0, True, also=("invalid_index",))
    causes = rank(pair(draw(9, 6, seed=3), draw(9, 6), tensor="saved.h", ratios=[], whatif=[stride]), {})
    scores = {c.id: c.score for c in causes}
    assert 0 < scores["invalid_index"] < scores["wrong_stride"] - 0.05 < scores["wrong_saved_tensor"]


@pytest.mark.parametrize("empty, first", [(True, "empty_group"), (False, "uninitialised_accumulator")])
def test_unwritten_elements_that_should_be_zero_are_no_accumulator(empty, first):
    golden = G.clone()
    golden[3] = 0 if empty else 1
    got = golden.clone()
    got[3] = math.nan
    where = Location("y", axes={"0": [(3, 3)]}, fraction=1 / 12, text="axis 0: 3")
    fact = MemoryFact("never_written", "y", "y holds uninitialised memory: axis 0: 3", where)
    runs = {"zeroed memory": RunFact("zeroed memory")}
    assert rank(pair(got, golden, memory=[fact], runs=runs), {})[0].id == first


@pytest.mark.parametrize("agree, claimed", [(True, True), (False, False)])
def test_another_mask_does_not_change_elements_that_both_keep(agree, claimed):
    ours, theirs = (draw(12, 16, seed=s) > 0 for s in (3, 4))
    evidence = pair((G if agree else 2 * draw(12, 16, seed=7)) * ours, G * theirs, ratios=[], permutations=[])
    score = scored("dropout_mismatch", evidence)
    assert score > 0.8 if claimed else score == 0


@pytest.mark.parametrize("operators, first", [({"rand", "ge", "mul"}, "dropout_mismatch"), ({"mul"}, "off_by_one")])
def test_another_seed_is_another_mask_where_random_numbers_are_drawn(operators, first):
    ours, theirs = (draw(12, 16, seed=s) > 0 for s in (3, 4))
    result = WhatIf("off_by_one", "seed is 18, one too high", "x.grad", 1.0, True, prior=0.6, others=0.0)
    empty_evidence = {"tensor": "x.grad", "ratios": [], "permutations": []}
    evidence = pair(G * ours, G * theirs, whatif=[result], operators=frozenset(operators), **empty_evidence)
    assert rank(evidence, {})[0].id == first
