"""Operators as targets: backends are held to the explicit backward, which is itself held to autograd."""

import pytest
import torch

from goldsmith import assay
from goldsmith.cli.targets import op_dtypes, op_target
from goldsmith.core.op import Op

VALUES = ("values", "ensemble")
POST = Op.get("mhc.post")


def stages(report):
    return {row.tensor for row in report.rows if row.kind == "stage"}


def test_a_backends_backward_is_compared_stage_by_stage():
    reason = POST.why_not("triton", *(POST.cases[1].build()[n] for n in POST.inputs), orientation="in_out")
    if reason is not None:
        pytest.skip(f"triton: {reason}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = assay.check(op_target(POST, "triton"), "two_streams", dtype=torch.float32, device=device, probes=VALUES)
    assert not [note for note in report.notes if note.id == "unknown_stage"]
    assert {"df", "dh_post", "dh_res", "dx_post"} <= stages(report)
    assert report.stages[-4:] == ["x.grad", "f.grad", "h_post.grad", "h_res.grad"]


@pytest.mark.parametrize("name", ["mhc.post", "mhc.sinkhorn", "mhc.expand", "mhc.head", "mhc.coefficients"])
def test_the_reference_names_only_stages_of_its_golden(name):
    op = Op.get(name)
    case = min((c for c in op.cases if c.sizes.get("T") not in (0, ())), key=lambda c: str(c.sizes.get("T")))
    report = assay.check(op_target(op, "reference"), case, dtype=op_dtypes(op)[0], probes=VALUES)
    assert not [note for note in report.notes if note.id == "unknown_stage"]


def wrong_by_a_percent(right):
    def backward(grads, tensors, options, needs):
        result = right(grads, tensors, options, needs)
        return {name: grad * 1.01 if name == "f" else grad for name, grad in result.items()}

    return backward


def test_a_wrong_explicit_backward_is_rejected_by_autograd(monkeypatch):
    monkeypatch.setattr(POST.reference, "backward", wrong_by_a_percent(POST.reference.backward))
    report = assay.check(op_target(POST, "reference"), "two_streams", dtype=torch.float32, probes=VALUES, raises=False)
    assert report.verdict == "fail" and {f.tensor for f in report.findings} == {"f.grad"}


def test_a_wrong_explicit_backward_is_a_reference_fault_for_every_other_backend(monkeypatch):
    monkeypatch.setattr(POST.reference, "backward", wrong_by_a_percent(POST.reference.backward))
    target = op_target(POST, "triton")
    reason = POST.why_not("triton", *(POST.cases[1].build()[n] for n in POST.inputs), orientation="in_out")
    if reason is not None:
        pytest.skip(f"triton: {reason}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = assay.check(target, "two_streams", dtype=torch.float32, device=device, probes=VALUES, raises=False)
    assert report.verdict == "reference_fault"


def test_in_16_bits_the_golden_backward_starts_from_rounded_results():
    boundary = Op.get("mhc.boundary")
    assay.check(op_target(boundary, "reference"), "three_streams", dtype=torch.bfloat16, probes=VALUES)


def test_an_operator_without_gradients_has_no_golden_backward():
    target = op_target(Op.get("mhc.pre_backward"), "reference")
    assert target.backward is None and target.golden_backward is None
