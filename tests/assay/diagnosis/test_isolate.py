"""The first wrong stage is found however many stages the candidate names; right stages are not accused."""

import pytest
import torch

from assay.diagnosis.targets import adapter, layer, scaled_inside, session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.experiments.isolate import isolate
from goldsmith.assay.execute.tracer import Tracer
from goldsmith.core.tracing import listening


def states(table):
    return {s.name: s.state for s in table.stages}


def test_a_right_kernel_has_no_wrong_stage():
    table = isolate(session_of(layer()))
    assert table.first_wrong is None and set(states(table).values()) == {"ok"}, states(table)


@pytest.mark.parametrize("fault", ["h", "z", "p", "y"])
def test_the_wrong_stage_is_the_culprit_and_what_follows_inherits(fault):
    table = isolate(session_of(layer(fault)))
    forward = ["h", "z", "p", "y"]
    place = forward.index(fault)
    result = states(table)
    assert table.first_wrong == fault
    assert [result[n] for n in forward[:place]] == ["ok"] * place
    assert result[fault] == "culprit"
    assert [result[n] for n in forward[place + 1 :]] == ["inherited"] * (3 - place), result
    wrong = next(s for s in table.stages if s.name == fault)
    assert wrong.isolated > 1 and wrong.propagated > 1


def test_autograd_through_a_wrong_stage_is_judged_stage_by_stage():
    """p is a sigmoid: its value and its derivative are wrong, and earlier gradients inherit."""
    result = states(isolate(session_of(layer("p"))))
    assert result["p"] == result["z.grad"] == "culprit" and result["p.grad"] == "ok"
    assert {result[n] for n in ("h.grad", "x.grad", "w.grad", "b.grad")} == {"inherited"}, result


@pytest.mark.parametrize("names, first", [(("h", "p"), "p"), (("h",), "y"), (("p",), "p"), ((), "y")])
def test_a_candidate_may_name_only_some_stages(names, first):
    table = isolate(session_of(layer("z", names)))
    assert table.first_wrong == first
    assert table.stages[1].name == "z" and table.stages[1].state == "not judged"


def test_unnamed_stages_that_could_be_wrong_are_suspects():
    table = isolate(session_of(layer("h", names=())))
    assert set(table.suspects) >= {"h"} and table.first_wrong == "y"
    assert isolate(session_of(layer("h"))).suspects == []


def test_a_stage_whose_value_is_ignored_is_reported():
    table = isolate(session_of(layer("h", ignore=("h",))))
    assert table.first_wrong == "h" and table.ignored == {"h", "h.grad"}
    assert states(table)["h"] == "culprit" and states(table)["z"] == "observed", states(table)


def test_a_differently_defined_stage_is_not_accused():
    table = isolate(session_of(scaled_inside("z")))
    assert table.first_wrong == "z" and table.otherwise == {"h", "h.grad"}
    assert states(table)["h"] == "not judged"


def test_a_differently_defined_stage_of_a_right_kernel_is_a_note_in_the_report():
    examination = session_of(scaled_inside())
    assert examination.bad == set()


@pytest.mark.parametrize(
    "fault, first, inherits",
    [
        ("dlow", "dlow", {"x.grad", "a.grad"}),
        ("missing", "x.grad", set()),
        ("not_computed", "a.grad", set()),
        ("saved", "saved.low", {"b.grad"}),
    ],
)
def test_the_backward_of_an_adapter(fault, first, inherits):
    table = isolate(session_of(adapter(fault)))
    result = states(table)
    assert table.first_wrong == first, result
    assert {n for n, s in result.items() if s == "inherited"} == inherits, result
    assert [n for n, s in result.items() if s == "culprit"] == [first], result


def test_a_backward_without_stages_has_suspects():
    table = isolate(session_of(adapter("dlow", named=False)))
    assert table.first_wrong == "x.grad" and "dlow" in table.suspects, (states(table), table.suspects)
    assert "base" not in table.suspects


def test_a_small_scale_needs_the_ensemble_and_is_isolated_with_it():
    def kernel(x, w, b):
        h = assay.stage("h", x @ w)
        z = assay.stage("z", (h + b) * (1 + 2.0**-17))
        return assay.stage("p", torch.softmax(z, -1)) * 2

    right = layer()
    table = isolate(session_of(assay.Target(kernel, right.golden, cases=right.cases)))
    assert table.first_wrong == "z", states(table)


def test_a_substituted_gradient_replaces_the_incoming_one():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    tracer = Tracer(substitute={"h": torch.tensor([5.0, 6.0]), "h.grad": torch.tensor([7.0, 8.0])})
    with listening(tracer):
        h = assay.stage("h", 3 * x)
    assert h.tolist() == [5.0, 6.0]
    mine, before = torch.autograd.grad((h * h).sum(), [h, x])
    assert mine.tolist() == [10.0, 12.0] and before.tolist() == [21.0, 24.0]
