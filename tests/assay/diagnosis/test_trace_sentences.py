"""Where NaN and Inf begin, and which output gradient carries a wrong gradient."""

import pytest
import torch

from assay.diagnosis.targets import session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.collect import begin
from goldsmith.assay.diagnosis.experiments.cotangents import carriers
from goldsmith.assay.diagnosis.experiments.provenance import provenance
from goldsmith.assay.diagnosis.report.sentences import trace_sentences


@assay.case(T=[5], D=[6])
def large(make, T, D):
    return {"x": 30 * make.normal(T, D), "w": 400 * make.normal(T, D)}


def squares(x, w):
    low = assay.stage("low", x + w)
    product = assay.stage("product", low * low)
    return product / (1 + product)


def halves(x, w):
    low = assay.stage("low", x + w)
    product = assay.stage("product", (low.half() * low.half()).float())
    return product / (1 + product)


def examination(kernel, golden=squares, cases=large, **more):
    return session_of(assay.Target(kernel, golden, cases=cases, **more))


def test_a_product_that_overflows_float16_is_named():
    it = examination(halves, backward=None)
    born = provenance(it, it.first)
    assert (born.kind, born.stage, born.cause) == ("inf", "product", "overflow")
    assert born.op == "aten::mul" and "in halves" in " ".join(born.sentences)
    best = assay.diagnose(it.target, probes="quick").causes[0]
    assert (best.id, best.tensor) == ("overflow", "product") and best.params["operation"] == "aten::mul"


def test_an_exponential_without_its_maximum():
    def bare(x, w):
        e = torch.exp(x + w)
        return e / e.sum(-1, keepdim=True)

    it = examination(bare, lambda x, w: torch.softmax(x + w, -1), backward=None)
    born = provenance(it, it.first)
    assert (born.op, born.cause) == ("aten::exp", "missing_max_shift"), born
    assert assay.diagnose(it.target, probes="quick").causes[0].id == "missing_max_shift"


def test_a_division_by_zero_is_neither_overflow_nor_missing_shift():
    def kernel(x, w):
        low = assay.stage("low", x + w)
        product = assay.stage("product", low * low)
        return product / (product - product)

    it = examination(kernel, backward=None)
    born = provenance(it, it.first)
    assert (born.stage, born.op, born.cause) == ("y", "aten::div", "") and "divisor holds 30 zeros" in str(born)


def test_poison_and_infinities_of_the_golden_are_not_followed():
    def unwritten(x, w):
        out = torch.empty(x.shape)
        out[:3] = squares(x, w)[:3]
        return out

    for kernel, golden in ((squares, squares), (unwritten, squares), (lambda x, w: x / 0, lambda x, w: x / 0)):
        it = examination(kernel, golden, backward=None)
        assert provenance(it, it.first) is None


# output gradients


@assay.case(T=[4], D=[40])
def pairs(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(T, D)}


def two(x, w):
    return x * w, x + w


def backward(fault):
    def run(x, w, grad_y0, grad_y1):
        dx = grad_y0 * w + grad_y1
        if fault == "y0":
            dx = 2 * grad_y0 * w + grad_y1
        if fault == "both":
            dx = 2 * dx
        if fault == "always":
            dx = dx + 1
        if fault == "crossed":
            dx = dx + grad_y0 * grad_y1
        if fault == "tail":
            dx = torch.cat([dx[:, :32], grad_y0[:, 32:] + grad_y1[:, 32:]], 1)
        if fault == "middle":
            dx = torch.cat([dx[:2], dx[2:3] + (grad_y0 * w)[2:3], dx[3:]])
        if fault == "between":
            dx = dx + grad_y0.roll(1, 0) * grad_y0
        return {"x": dx, "w": grad_y0 * x + grad_y1}

    return run


def sentence(fault):
    it = examination(two, two, pairs, backward=backward(fault))
    return it, carriers(it, it.first, "x.grad")


@pytest.mark.parametrize(
    "fault, outputs, always, parts",
    [
        ("y0", ("y0",), False, {}),
        ("both", ("y0", "y1"), False, {}),
        ("always", ("y0", "y1"), True, {}),
        ("crossed", (), False, {}),
        ("tail", ("y0",), False, {}),
        ("middle", ("y0",), False, {0: ((2, 2),)}),
        ("between", ("y0",), False, {0: ()}),
    ],
)
def test_the_output_whose_gradient_carries_the_fault(fault, outputs, always, parts):
    _, result = sentence(fault)
    assert (result.outputs, result.always, dict(result.parts)) == (outputs, always, parts)


def test_only_gradients_are_traced():
    it = examination(two, two, pairs, backward=backward("y0"))
    assert carriers(it, it.first, "y0") is None and carriers(it, it.first, "w.grad") is None  # the latter is right


@pytest.mark.parametrize(
    "fault, message",
    [
        ("y0", "x.grad is wrong with grad_y0 alone, and right with grad_y1 alone"),
        ("middle", "makes it wrong in axis 0 [2] alone"),
        ("both", "grad_y0 and grad_y1 each make x.grad wrong"),
        ("crossed", "No output's gradient alone makes x.grad wrong"),
        ("between", "No slice of grad_y0 along axis 0 alone makes x.grad wrong"),
        ("always", "x.grad is wrong with zeros for every output gradient"),
    ],
)
def test_the_sentences_of_a_trace(fault, message):
    it, result = sentence(fault)
    evidence = begin(it, assay.check(it.target, raises=False))
    evidence.carriers = result
    assert message in " ".join(trace_sentences(evidence))


def test_a_diagnosis_prints_its_traces():
    diagnosis = assay.diagnose(sentence("middle")[0].target)
    assert diagnosis.traced == diagnosis.to_json()["traced"]
    assert "makes it wrong in axis 0 [2] alone" in " ".join(str(diagnosis).split())
