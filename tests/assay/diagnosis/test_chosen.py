"""A choice that is not legal is where it begins, as long as what it was made of is right."""

import torch

from goldsmith import assay


@assay.case(T=[9], D=[5], N=[7], k=[3])
def tokens(make, T, D, N, k):
    return {"x": make.normal(T, D), "route": make.normal(D, N), "k": k}


def made(x, route, k, times=1.0, size=lambda score: score):
    score = assay.stage("score", times * (x @ route))
    index = assay.stage("index", size(score).topk(k, -1).indices)
    gate = assay.stage("gate", torch.sigmoid(score.gather(-1, index)))
    return (gate / gate.sum(-1, keepdim=True)).square().sum(-1), index


def golden(x, route, k):
    return made(x, route, k)


def diagnosed(kernel):
    target = assay.Target(
        kernel, golden, cases=tokens, outputs=("y", "index"), backward=None,
        decisions={"index": assay.topk(scores="score", k="k")}, name="chosen",
    )  # fmt: skip
    return assay.diagnose(target, probes="quick")


def test_a_choice_by_another_measure_is_the_first_wrong_stage():
    found = diagnosed(lambda x, route, k: made(x, route, k, size=torch.abs))
    assert (found.first_wrong_stage, found.causes[0].id) == ("index", "wrong_decision"), str(found)
    states = {s.name: s.state for s in found.stages}
    assert (states["score"], states["index"]) == ("ok", "culprit")
    assert found.case["sizes"]["T"] == 1, found.case  # the smaller case begins there as well


def test_a_choice_of_wrong_scores_is_not():
    found = diagnosed(lambda x, route, k: made(x, route, k, times=-1.0))
    assert found.first_wrong_stage == "score", str(found)


def test_a_legal_choice_is_nobodys_fault():
    assert diagnosed(golden).ok
