"""A stale copy of any input (numbers, lengths or a mask) is recognised, and no sentence contradicts it."""

import pytest
import torch

from assay.diagnosis.targets import session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.experiments.runs import OTHERS, facts
from goldsmith.assay.diagnosis.facts.evidence import RunFact

pytestmark = pytest.mark.sweep(8)


@assay.case(B=[4], L=[9])
def rows(make, B, L):
    lengths = make.integers(1, L + 1, B)
    mask = torch.arange(L)[None] < make.integers(1, L + 1, B)[:, None]
    return {"x": make.normal(B, L), "n": lengths, "mask": mask}


def golden(x, n, mask):
    inside = torch.arange(x.shape[1])[None] < n[:, None]
    return torch.where(inside & mask, x, 0).sum(-1)


def keeps(name):
    """The golden with a copy of one input, made once per shape."""
    kept = {}

    def kernel(x, n, mask):
        now = {"x": x, "n": n, "mask": mask}
        now[name] = kept.setdefault(x.shape, now[name].detach().clone())
        return golden(**now)

    return assay.Target(kernel, golden, cases=rows, name=f"keeps {name}", backward=None)


@pytest.mark.parametrize("name", ["n", "mask", "x"])
def test_a_stale_copy_of_any_input_is_recognised(name):
    diagnosis = assay.diagnose(keeps(name))
    best = diagnosis.causes[0]
    assert best.id == "stale_copy" and best.score > 0.9, str(diagnosis)
    assert f" {name} " in " ".join(best.evidence), best.evidence
    assert not any("no input as it was" in message for message in best.evidence)


@pytest.mark.parametrize("name", ["n", "mask"])
def test_the_run_with_other_inputs_names_the_stale_input(name):
    fact: RunFact = facts(session_of(keeps(name)), only=(OTHERS,))[OTHERS]
    assert fact.wrong == ("y",) and fact.stale == (name,), fact


def test_a_right_kernel_has_no_stale_inputs():
    diagnosis = assay.diagnose(assay.Target(lambda x, n, mask: golden(x, n, mask), golden, cases=rows))
    assert diagnosis.verdict == "pass", str(diagnosis)


def test_a_copy_from_an_earlier_call_is_recognised_if_the_first_call_is_wrong():
    kept = {}

    def kernel(x, w, v):
        return torch.tanh(x @ kept.setdefault(w.shape, w.detach().clone())) * v

    def product(x, w, v):
        return torch.tanh(x @ w) * v

    kernel(torch.randn(5, 6), torch.randn(6, 4), torch.randn(4))
    inputs = {"x": torch.randn(5, 6), "w": torch.randn(6, 4), "v": torch.randn(4)}
    best = assay.diagnose(assay.Target(kernel, product, cases=inputs)).causes[0]
    assert best.id == "stale_copy" and best.params == {"input": "w"}
    assert best.evidence[0] == "whatever w holds, y stays as it is, bit for bit, and it is nowhere zero"


def test_an_ignored_input_is_no_stale_copy():
    inputs = {"x": torch.randn(5, 6), "w": torch.randn(5, 6)}
    best = assay.diagnose(assay.Target(lambda x, w: x.sin(), lambda x, w: x.sin() + w, cases=inputs)).causes[0]
    assert best.id == "missing_term", best
