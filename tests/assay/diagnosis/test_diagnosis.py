"""`diagnose` finds stage and cause of kernels with known faults."""

import json

import pytest
import torch

from assay.diagnosis.targets import adapter, layer, layer_case, layer_golden
from goldsmith import assay
from goldsmith.assay.diagnosis import driver
from goldsmith.assay.diagnosis.driver import diagnose

pytestmark = pytest.mark.sweep(8)


@pytest.mark.parametrize(
    "target, stage, cause",
    [
        (layer("h"), "h", "truncated_reduction"),
        (layer("z"), "z", "sign_flip"),
        (layer("y"), "y", "wrong_factor"),
        (adapter("dlow"), "dlow", "wrong_factor"),
        (adapter("missing"), "x.grad", "missing_term"),
        (adapter("saved"), "saved.low", "wrong_saved_tensor"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_stage_and_the_likeliest_cause(target, stage, cause):
    diagnosis = diagnose(target, probes="quick")
    assert (diagnosis.verdict, diagnosis.first_wrong_stage) == ("fail", stage)
    assert diagnosis.causes[0].id == cause, str(diagnosis)
    assert stage in str(diagnosis) and cause in str(diagnosis)


def test_a_right_kernel_is_not_accused():
    diagnosis = diagnose(layer(), probes="quick")
    assert (
        diagnosis.ok
        and diagnosis.first_wrong_stage is None
        and diagnosis.causes == []
        and str(diagnosis).startswith("PASS")
    )


def test_if_the_golden_is_at_fault_the_candidate_is_not_accused():
    def golden(x, w, b):
        return layer_golden(x.float(), w.float(), b.float())

    diagnosis = diagnose(assay.Target(layer("h").candidate, golden, cases=layer_case), probes="quick")
    assert diagnosis.verdict == "reference_fault" and diagnosis.first_wrong_stage is None
    assert [c.id for c in diagnosis.causes] == ["reference_fault"] and str(diagnosis).startswith("REFERENCE FAULT")


def test_a_candidate_that_raises_is_a_cause():
    def kernel(x, w, b):
        raise IndexError("pop from empty list")

    diagnosis = diagnose(assay.Target(kernel, layer_golden, cases=layer_case), probes="quick")
    assert diagnosis.verdict == "fail" and diagnosis.causes[0].id == "exception", str(diagnosis)


def test_the_ranges_that_a_cut_reduction_leaves_out_are_parameters():
    best = diagnose(layer("h"), probes="quick").causes[0]
    assert best.params["missing"] == [16, 20] and best.params["axis"] in (0, 1)


def test_the_result_is_plain_json_and_repeatable():
    first, second = (diagnose(layer("z"), probes="quick").to_json() for _ in range(2))
    assert json.loads(json.dumps(first)) == first
    assert first["causes"] == second["causes"] and first["stages"] == second["stages"]
    assert first["examined"]["sizes"] == {"T": 6, "D": 20, "E": 12}


def test_cases_with_a_size_of_one_come_last():
    @assay.case(T=[1, 5], D=[8], E=[4])
    def cases(make, T, D, E):
        return {"x": make.normal(T, D), "w": make.normal(D, E), "b": make.normal(E)}

    target = assay.Target(lambda x, w, b: torch.softmax(x @ w - b, -1) * 2, layer_golden, cases=cases)
    assert diagnose(target, probes="quick").examined["sizes"]["T"] == 5
    assert diagnose(target, cases[0], probes="quick").examined["sizes"]["T"] == 1


def test_a_spent_budget_is_reported_and_the_stage_still_known():
    diagnosis = diagnose(layer("h"), probes="quick", budget_s=0.05)
    assert diagnosis.partial and diagnosis.first_wrong_stage in ("h", None)


def test_an_argument_that_is_not_a_target_is_refused():
    with pytest.raises(TypeError, match="assay.Target"):
        diagnose(layer_golden)
    with pytest.raises(ValueError, match="budget_s"):
        diagnose(layer(), budget_s=0)


@pytest.mark.sweep(8, part=3)
def test_the_smallest_case_keeps_stage_and_cause(monkeypatch):
    monkeypatch.setattr(driver, "_SMALLER", 50.0)  # a busy machine needs more than 7 s
    diagnosis = diagnose(layer("h"))
    assert (diagnosis.case["sizes"]["T"], diagnosis.case["sizes"]["D"]) == (1, 17), diagnosis.case
    assert diagnosis.examined["sizes"] == {"T": 6, "D": 20, "E": 12}
    assert "layer_case[T=1,D=17," in str(diagnosis) and diagnosis.case["runs"] <= 64
    trial = assay.diagnose(layer("h"), layer_case[0])
    assert (trial.first_wrong_stage, trial.causes[0].id) == (diagnosis.first_wrong_stage, diagnosis.causes[0].id)


def test_a_failure_of_a_later_call_is_made_small_too():
    calls = []

    def kernel(x, w, b):
        calls.append(0)
        y = layer_golden(x, w, b)
        return y + (len(calls) > 1) * 0.1

    diagnosis = diagnose(assay.Target(kernel, layer_golden, cases=layer_case, reset=calls.clear))
    assert diagnosis.causes[0].id == "stale_state" and diagnosis.case["sizes"]["T"] == 1, str(diagnosis)


def test_out_holds_a_bundle_that_replays(tmp_path):
    target = layer("h")
    diagnosis = assay.diagnose(target, out=tmp_path)
    assert diagnosis.bundle.parent == tmp_path and f'replay("{diagnosis.bundle}", target)' in str(diagnosis)
    meta = assay.load_bundle(diagnosis.bundle).meta
    assert (meta["stage"], meta["causes"][0]["id"]) == ("h", "truncated_reduction")
    assert meta["sizes"] == diagnosis.case["sizes"]
    again = assay.replay(diagnosis.bundle, target)
    assert again.environment["replay"]["answer"] == "reproduced" and not again.ok
    assert assay.replay(diagnosis.bundle, layer()).environment["replay"]["answer"] == "not reproduced"


def test_no_bundle_is_written_for_a_right_kernel(tmp_path):
    diagnosis = assay.diagnose(layer(), probes="quick", out=tmp_path)
    assert diagnosis.ok and diagnosis.bundle is None and not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no failing case"):
        diagnosis.save(tmp_path)


@pytest.mark.parametrize("after", [1, 4, 40])
def test_an_interrupt_returns_the_results_so_far(after):
    calls = []
    wrong = layer("h").candidate

    def kernel(x, w, b):
        calls.append(0)
        if len(calls) == after:
            raise KeyboardInterrupt
        return wrong(x, w, b)

    diagnosis = diagnose(assay.Target(kernel, layer_golden, cases=layer_case, name="layer"))
    assert diagnosis.partial == "interrupted" and "partial: interrupted" in str(diagnosis)
    assert diagnosis.verdict == ("unjudged" if after == 1 else "fail") and not diagnosis.ok
    assert after < 40 or diagnosis.first_wrong_stage == "h"
    begins = "NOT FINISHED layer" if after == 1 else "FAIL "
    text = " ".join(str(diagnosis).split())
    assert text.startswith(begins) and ("nothing wrong was found until then" in text) == (after == 1)


def test_a_stage_in_a_segment_is_drawn():
    text = str(diagnose(layer("h"), probes="quick", budget_s=None))
    assert "Where  every element" in text and "############" in text and "6 x 12 elements" in text


def test_a_configuration_of_other_sizes_is_found_in_one_case():
    @assay.case(T=[4], D=[24, 40])
    def widths(make, T, D):
        return {"x": make.normal(T, D)}

    blocks = {}

    def kernel(x):
        block = blocks.setdefault("block", x.shape[1])
        h = assay.stage("h", x[:, :block].sum(-1))
        return 2 * h

    target = assay.Target(kernel, lambda x: 2 * assay.stage("h", x.sum(-1)), cases=widths, reset=blocks.clear)
    diagnosis = diagnose(target, widths[1])
    assert (diagnosis.verdict, diagnosis.causes[0].id, diagnosis.first_wrong_stage) == ("fail", "stale_config", "h"), (
        str(diagnosis)
    )
    assert diagnose(assay.Target(lambda x: 2 * x.sum(-1), target.golden, cases=widths)).ok


def test_the_stage_of_a_later_call_is_named():
    kept = {}

    def kernel(x, w, b):
        h = assay.stage("h", x @ kept.setdefault("w", w.clone()))
        return torch.softmax(assay.stage("z", h + b), -1) * 2

    diagnosis = diagnose(assay.Target(kernel, layer_golden, cases=layer_case, backward=None, reset=kept.clear))
    assert (diagnosis.causes[0].id, diagnosis.first_wrong_stage) == ("stale_copy", "h"), str(diagnosis)
    assert str(diagnosis).startswith("FAIL  h is wrong: a copy of an input is not refreshed (stale_copy, ")


def test_inputs_that_fail_in_any_call_are_not_called_stale():
    @assay.case(T=[9])
    def picked(make, T):
        return {"x": make.normal(T), "k": make.integers(0, 5, 1)}

    right = int(picked[0].build(dtype=torch.float32, device="cpu", seed=0)["k"])
    target = assay.Target(lambda x, k: x * (2 + (k != right)), lambda x, k: x * 2, cases=picked, backward=None)
    diagnosis = diagnose(target)
    run = diagnosis.evidence.runs["other inputs"]
    assert (diagnosis.verdict, run.wrong, run.stale) == ("fail", ("y",), ()), str(diagnosis)
    assert all(cause.id != "stale_copy" or cause.score < 0.5 for cause in diagnosis.causes), str(diagnosis)


@assay.case(T=[6], D=[40])
def plain_rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(T, D)}


def test_a_gradient_that_is_written_over_an_input_comes_first():
    def golden(x, w):
        return w * torch.tanh(x)

    def backward(x, w, grad_y):
        dx = grad_y * w * (1 - torch.tanh(x).square())
        return {"w": grad_y * torch.tanh(x.copy_(dx)), "x": x}

    diagnosis = diagnose(assay.Target(golden, golden, cases=plain_rows, backward=backward, grads=("w", "x")))
    assert (diagnosis.causes[0].id, diagnosis.first_wrong_stage) == ("input_modified", "x.grad"), str(diagnosis)
    states = {s.name: s.state for s in diagnosis.stages}
    assert (states["x.grad"], states["w.grad"]) == ("culprit", "inherited") and not diagnosis.undecided


@pytest.mark.parametrize("accepts", [True, False])
def test_a_fault_that_16_bit_rounding_hides_is_examined_in_float32(accepts):
    def golden(x, w):
        return (x - x.mean(-1, keepdim=True)) * w

    def kernel(x, w):
        if x.dtype == torch.float32 and not accepts:
            raise TypeError("bfloat16 only")
        wide = x.float()
        return ((wide - wide.mean(-1, keepdim=True)) * w.float() * 1.002).to(x.dtype)

    target = assay.Target(kernel, golden, cases=plain_rows, dtypes=(torch.bfloat16,), backward=None)
    diagnosis = diagnose(target)
    assert diagnosis.verdict == "fail" and (diagnosis.causes[0].id == "scale_bias") == accepts, str(diagnosis)
    assert (diagnosis.case["dtype"] == "float32") == accepts == ("Examined with float32 inputs" in str(diagnosis))
    assert diagnosis.float32 == ("fails" if accepts else "raises")


def test_the_facts_hold_the_verdict_of_float32_inputs_and_the_data_the_headline():
    def kernel(x, w):
        return x * w if x.dtype == torch.float32 else x * w * 2

    target = assay.Target(kernel, torch.mul, cases=plain_rows, dtypes=(torch.bfloat16,), backward=None)
    diagnosis = diagnose(target)
    text = " ".join(str(diagnosis).split())
    assert diagnosis.float32 == diagnosis.to_json()["float32"] == "passes"
    assert "with float32 inputs passes: only 16-bit inputs show the fault" in text
    assert text.startswith(" ".join(str(diagnosis.to_json()["headline"]).split()))


def test_padding_that_enters_a_maximum():
    def kernel(x, w):
        e = torch.exp(x - x.amax(-1, keepdim=True).clamp(min=0.0))
        return e / e.sum(-1, keepdim=True)

    target = assay.Target(kernel, lambda x, w: torch.softmax(x, -1), cases=plain_rows, backward=None)
    assert diagnose(target).causes[0].id == "wrong_mask"


def test_a_term_of_a_backward_that_is_left_out():
    @assay.case(T=[7], D=[24])
    def tokens(make, T, D):
        return {"x": make.normal(T, D), "w": make.normal(D)}

    def golden(x, w):
        return x * assay.stage("scale", torch.rsqrt(x.square().mean(-1, keepdim=True))) * w

    def backward(x, w, grad_y):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True))
        return {"x": scale * grad_y * w, "w": (grad_y * x * scale).sum(0)}

    diagnosis = diagnose(assay.Target(golden, golden, cases=tokens, backward=backward))
    assert (diagnosis.first_wrong_stage, diagnosis.causes[0].id) == ("x.grad", "missing_term"), str(diagnosis)


def test_no_axis_of_given_tensors_becomes_empty():
    """An axis that has nothing to do with the fault becomes 1."""
    inputs = {"x": torch.randn(6, 4), "e": torch.randn(4, 3), "s": 2.5}
    golden = lambda x, e, s: (x * 2).sum(0) + e.sum()  # noqa: E731
    target = assay.Target(lambda x, e, s: (x * s).sum(0) + e.sum(), golden, cases=inputs, name="scaled")
    assert assay.diagnose(target).case["name"] == "given[3->1,4->1,6->1]"
