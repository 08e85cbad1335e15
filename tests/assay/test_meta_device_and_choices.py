"""Mistakes without a torch error: results on the meta device, and choices among missing scores."""

import pytest
import torch

from assay.kernels import texts
from goldsmith import assay

X = {"x": torch.arange(12.0).reshape(3, 4)}


def double(x):
    return x * 2


def backward(x, grad_y):
    return (2 * grad_y).to("meta")


MESSAGE = "is on the meta device, whose tensors hold no numbers (values)"


@pytest.mark.parametrize("verb", [lambda t: assay.check(t, raises=False), lambda t: assay.diagnose(t).report])
def test_a_result_on_the_device_meta_is_a_finding(verb):
    report = verb(assay.Target(lambda x: double(x).to("meta"), double, cases=X))
    assert report.verdict == "fail" and texts(report, "values") == [f"the candidate's y {MESSAGE}"]


def test_a_gradient_on_the_device_meta_is_a_finding():
    report = assay.check(assay.Target(double, double, cases=X, backward=backward, outputs=("y",)), raises=False)
    assert report.verdict == "fail" and texts(report, "values") == [f"the candidate's x.grad {MESSAGE}"]


def test_a_golden_on_the_device_meta_is_a_mistake_in_the_declaration():
    with pytest.raises(assay.TargetError, match="^outputs: the golden's 'y' is on the meta device"):
        assay.check(assay.Target(double, lambda x: double(x).to("meta"), cases=X))


@assay.case(k=[2])
def scores(make, k):
    return {"x": make.normal(3, 4), "k": k, "many": 99, "half": 0.5}


def best(x, k):
    index = assay.stage("index", x.topk(k).indices)
    return x.gather(-1, index), index


WRONG = [
    ({"k": 2, "dim": 7}, "dim 7 is no axis of the scores 'x', whose shape is [3, 4]"),
    ({"k": 99}, "k is 99, but there are only 4 along dim -1 of 'x', whose shape is [3, 4]"),
    ({"k": "many"}, "'many' is 99, but there are only 4 along dim -1 of 'x', whose shape is [3, 4]"),
    ({"k": "half"}, "'half' is 0.5; the number of choices must be a whole number"),
]


@pytest.mark.parametrize("choice, text", WRONG, ids=range(len(WRONG)))
def test_a_choice_among_missing_scores_is_a_mistake_in_the_declaration(choice, text):
    one = assay.Target(best, best, cases=scores, outputs=("y", "index"),
                       decisions={"index": assay.topk(scores="x", **choice)})  # fmt: skip
    with pytest.raises(assay.TargetError) as error:
        assay.check(one)
    assert str(error.value) == f"decisions['index']: {text}"


def test_arguments_of_a_decision_are_validated():
    with pytest.raises(TypeError, match=r"^topk: dim must be a whole number, got 'a'$"):
        assay.topk(scores="x", k="k", dim="a")
    with pytest.raises(TypeError, match=r"^argmax: dim must be a whole number, got 1\.5$"):
        assay.argmax(scores="x", dim=1.5)
    with pytest.raises(TypeError, match=r"^topk: k must be a whole number, got 1\.5$"):
        assay.topk(scores="x", k=1.5)
    with pytest.raises(assay.TargetError, match=r"^topk: k must be a number >= 0 or the name of a scalar, got -1$"):
        assay.topk(scores="x", k=-1)
