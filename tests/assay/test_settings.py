"""torch settings that a candidate leaves changed are reported, and undone after the run."""

from functools import partial

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.execute import torch_state
from goldsmith.assay.execute.torch_state import restored_settings

INPUTS = {"x": torch.arange(12.0)}


SETS = {
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), "float32", "float64"),
    "number of threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), None, None),
    "grad mode": (lambda: torch.set_grad_enabled(False), "on", "off"),
    "default device": (lambda: torch.set_default_device("meta"), "cpu", "meta"),
    "deterministic mode": (lambda: torch.use_deterministic_algorithms(True), "0", "2"),
    "flushing of subnormals": (lambda: torch.set_flush_denormal(True), "off", "on"),
    "anomaly mode": (lambda: torch.autograd.set_detect_anomaly(True), "off", "on"),
    "autocast on cpu": (lambda: torch.set_autocast_enabled("cpu", True), "off", "on"),
}


def state():
    return [setting.get() for setting in torch_state._SETTINGS]


def that_sets(what):
    def kernel(x):
        y = x * 2
        SETS[what][0]()
        return y

    return assay.Target(kernel, lambda x: x * 2, cases=INPUTS, backward=None)


@pytest.mark.parametrize("what", SETS)
@pytest.mark.parametrize("verb", [partial(assay.check, probes="quick"), lambda t: assay.diagnose(t, probes="quick")])
def test_a_changed_setting_is_reported_and_undone(verb, what):
    before, threads = state(), torch.get_num_threads()
    result = verb(that_sets(what))
    assert state() == before
    (note,) = [n for n in getattr(result, "report", result).notes if n.id == "settings"]
    was, now = SETS[what][1:] if what != "number of threads" else (threads, threads + 1)
    assert (
        note.text
        == f"torch's {what}, which was {was}, is {now} after a run (values), which affects everything that runs later"
    )


@pytest.mark.parametrize("verb", [partial(assay.check, raises=False), lambda t: assay.diagnose(t)])
@pytest.mark.parametrize("outside", [torch.no_grad, torch.inference_mode])
def test_check_and_diagnose_give_equal_results_in_every_mode_of_the_caller(verb, outside):
    wrong = assay.Target(lambda x: x * 2 + 1e-3 * x.detach() ** 2, lambda x: x * 2 + 1e-3 * x**2, cases=INPUTS)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    with outside():
        result = verb(wrong)
        assert not torch.is_grad_enabled() and torch.equal(torch.random.get_rng_state(), before)
    assert {f.tensor for f in getattr(result, "report", result).findings} == {"x.grad"}
    if isinstance(result, assay.Diagnosis):
        assert result.first_wrong_stage == "x.grad" and {"y", "x.grad"} <= {s.name for s in result.stages}


def test_a_changed_setting_is_undone_when_the_kernel_raises():
    changed = []
    with pytest.raises(ValueError), restored_settings(changed):
        torch.set_default_dtype(torch.float64)
        raise ValueError
    assert torch.get_default_dtype() == torch.float32 and len(changed) == 1


def test_a_kernel_that_changes_no_setting_gets_no_note():
    report = assay.check(assay.Target(lambda x: x * 2, lambda x: x * 2, cases=INPUTS, backward=None), probes="quick")
    assert not [n for n in report.notes if n.id == "settings"]
