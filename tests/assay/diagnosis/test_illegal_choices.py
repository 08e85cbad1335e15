"""An illegal choice is the first wrong stage, as long as its inputs are right."""

import pytest
import torch

from goldsmith import assay

pytestmark = pytest.mark.sweep(8)


@assay.case(T=[9], D=[5], N=[7], k=[3])
def tokens(make, T, D, N, k):
    return {"x": make.normal(T, D), "route": make.normal(D, N), "k": k}


def build(x, route, k, times=1.0, size=lambda score: score):
    score = assay.stage("score", times * (x @ route))
    index = assay.stage("index", size(score).topk(k, -1).indices)
    gate = assay.stage("gate", torch.sigmoid(score.gather(-1, index)))
    return (gate / gate.sum(-1, keepdim=True)).square().sum(-1), index


def golden(x, route, k):
    return build(x, route, k)


def diagnosed(kernel):
    target = assay.Target(
        kernel, golden, cases=tokens, outputs=("y", "index"), backward=None,
        decisions={"index": assay.topk(scores="score", k="k")}, name="chosen",
    )  # fmt: skip
    return assay.diagnose(target, probes="quick")


def test_a_choice_by_another_measure_is_the_first_wrong_stage():
    result = diagnosed(lambda x, route, k: build(x, route, k, size=torch.abs))
    assert (result.first_wrong_stage, result.causes[0].id) == ("index", "wrong_decision"), str(result)
    states = {s.name: s.state for s in result.stages}
    assert (states["score"], states["index"]) == ("ok", "culprit")
    assert result.case["sizes"]["T"] == 1, result.case  # the smaller case begins there as well


def test_a_choice_from_wrong_scores_is_not_the_first_wrong_stage():
    result = diagnosed(lambda x, route, k: build(x, route, k, times=-1.0))
    assert result.first_wrong_stage == "score", str(result)


def test_a_legal_choice_is_not_accused():
    assert diagnosed(golden).ok
