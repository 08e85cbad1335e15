"""If warnings are errors, a diagnosis gives the same result: its own arithmetic causes no warnings."""

import warnings

import torch

from assay.diagnosis.targets import adapter, session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.graph.recording import Listening
from goldsmith.assay.diagnosis.search import search


def strictly(target):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return assay.diagnose(target)


def test_sizes_of_addends_in_a_backward_are_read_without_a_warning():
    result = strictly(adapter("missing", named=False))
    assert result.causes[0].id == "missing_term" and not result.evidence.left_out, str(result)
    assert not any("Left out" in message for message in result.traced), result.traced


def test_a_changed_golden_may_warn():
    @assay.case(N=[5], D=[3])
    def rows(make, N, D):
        return {"x": make.normal(N, D)}

    def golden(x):
        return x / x.std(0, keepdim=True)

    examination = session_of(assay.Target(lambda x: 2 * golden(x), golden, cases=rows, backward=None))
    result = search(examination, "y", examination.first.outputs["y"], examination.first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = result.golden.run_under(Listening(), {"x": examination.ref.leaves["x"][:1]}, "y")
    assert bool(torch.isnan(outputs["y"]).all())  # torch warns about the standard deviation of a single number


def test_a_kernel_without_a_module_is_diagnosed():
    space = {"__builtins__": __builtins__}
    exec("def kernel(x):\n    return -x", space)
    target = assay.Target(space["kernel"], lambda x: x.clone(), cases={"x": torch.randn(3, 4)})
    assert space["kernel"].__module__ is None
    assert assay.diagnose(target).causes[0].id == "sign_flip"


def test_smaller_inputs_that_the_user_did_not_write_cause_no_warning():
    @assay.case(N=[5], D=[6])
    def rows(make, N, D):
        return {"x": make.normal(N, D)}

    def centred(x, variance):
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + 1e-5)

    target = assay.Target(
        lambda x: centred(x, x.var(-1, keepdim=True)),  # torch warns about the variance of a single number
        lambda x: centred(x, ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True)),
        cases=rows,
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = assay.diagnose(target)
    assert result.case["name"] != result.examined["name"] and not seen, [str(warning.message) for warning in seen]
