"""Other runs of a wrong case, and influence: they distinguish state, memory, layouts and truncated reductions."""

import pytest
import torch

from assay.diagnosis.targets import adapter, layer, layer_case, layer_golden, session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.experiments.influence import influence
from goldsmith.assay.diagnosis.experiments.runs import facts


def of(kernel, **more):
    return session_of(assay.Target(kernel, layer_golden, cases=layer_case, **more))


def right(x, w, b):
    return torch.softmax(x @ w + b, -1) * 2


def test_all_runs_of_a_right_kernel_are_right_and_equal_for_equal_inputs():
    runs = facts(session_of(layer()))
    assert {n for n, f in runs.items() if not f.right} == set()
    assert all(runs[n].same for n in ("zeroed memory", "second call", "back", "repeat 1", "repeat 3"))
    assert {"zeroed memory", "second call", "back", "repeat 3", "layout stride0", "scale 2^-12"} <= set(runs)


def test_a_wrong_kernel_is_wrong_in_all_of_them():
    runs = facts(session_of(layer("h")), repeats=1)
    assert not any(runs[n].right for n in ("second call", "other inputs", "back", "repeat 1", "layout contiguous"))


def test_unwritten_memory_is_right_if_it_is_zero():
    def kernel(x, w, b):
        y = torch.empty(x.shape[0], w.shape[1])
        y[:4] = right(x, w, b)[:4]
        return y + right(x, w, b) - torch.cat([y[:4], torch.zeros(2, w.shape[1])])

    runs = facts(of(kernel, backward=None), repeats=1)
    assert runs["zeroed memory"].right and not runs["repeat 1"].right


def test_growing_state_is_right_only_in_a_fresh_call():
    kept = {}

    def kernel(x, w, b):
        kept["calls"] = kept.get("calls", 0) + 1
        return right(x, w, b) * kept["calls"]

    runs = facts(of(kernel, reset=kept.clear), repeats=2)
    assert runs["repeat 1"].right and runs["repeat 2"].right
    assert not runs["second call"].right and not runs["second call"].same and runs["second call"].difference > 0.1


def test_a_backward_that_is_right_on_the_goldens_saved_tensors():
    runs = facts(session_of(adapter("saved")), repeats=1)
    assert runs["golden saved"].right and runs["repeat 1"].wrong == ("saved.low", "b.grad")
    runs = facts(session_of(adapter("missing")), repeats=1)
    assert runs["golden saved"].wrong == ("x.grad",)


def test_a_raising_run_is_recorded():
    def kernel(x, w, b):
        if not x.is_contiguous():
            raise RuntimeError("x must be contiguous")
        return right(x, w, b)

    runs = facts(of(kernel), repeats=1)
    assert runs["layout contiguous"].right and "x must be contiguous" in runs["layout transposed"].error


def test_a_spent_budget_leaves_runs_out_and_counts_them():
    runs = facts(session_of(layer()), spent=lambda: True)
    assert runs == {}


def test_the_missing_range_of_a_truncated_reduction():
    examination = session_of(layer("h"))  # D = 20, and 16 are read
    ranges = influence(examination, {"h"})
    assert ranges["x[1]"].missing == ((16, 19),) and ranges["w[0]"].missing == ((16, 19),)
    assert "x[0]" not in ranges and "w[1]" not in ranges and "b[0]" not in ranges


def test_influence_that_should_not_be_there():
    def kernel(x, w, b):
        h = x @ w
        return torch.softmax(h + b, -1) * 2 + 0.01 * x[:1, :1]

    examination = of(kernel)
    ranges = influence(examination, examination.bad)
    assert ranges["x[0]"].extra == ((0, 0),)


def test_a_right_kernel_and_one_with_a_wrong_factor_have_the_goldens_influence():
    assert influence(session_of(layer()), {"y", "x.grad"}) == {}
    examination = session_of(layer("y"))
    assert influence(examination, examination.bad) == {}


@pytest.mark.parametrize("cut", [1, 7, 19])
def test_a_wrong_edge_at_any_index_is_explained(cut):
    def kernel(x, w, b):
        return torch.softmax(x[:, :cut] @ w[:cut] + b, -1) * 2

    examination = of(kernel)
    assert influence(examination, {"y"})["x[1]"].missing == ((cut, 19),)


@pytest.mark.parametrize(
    "kernel, is_rounding",
    [
        (lambda x: (x.bfloat16() * 3).sum(-1, dtype=torch.bfloat16).float(), True),
        (lambda x: 3 * x.sum(-1) * (1 + 0.01 * torch.tanh(x[:, 0])), False),
    ],
    ids=["narrow", "formula"],
)
def test_small_input_changes_keep_formula_errors_and_change_rounding_errors(kernel, is_rounding):
    case = {"x": torch.rand(64, 40, generator=torch.Generator().manual_seed(1))}
    target = assay.Target(kernel, lambda x: 3 * x.sum(-1), cases=case, backward=None)
    alike = facts(session_of(target), only=("nudged",))["nudged"].alike["y"]
    assert (abs(alike) < 0.5) is is_rounding
    causes = [c.id for c in assay.diagnose(target).causes]
    assert ("low_precision_accumulation" in causes) is is_rounding
