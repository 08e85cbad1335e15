"""Wrong reads: saved rows in another order, copies of another tensor, positions, limits, activations."""

from dataclasses import replace

import pytest
import torch

from assay.diagnosis.targets import explain, layer, session_of
from goldsmith import assay
from goldsmith.assay.checks import examine
from goldsmith.assay.diagnosis.causes.rules import matches
from goldsmith.assay.diagnosis.collect import begin, collect
from goldsmith.assay.diagnosis.experiments.influence import influence
from goldsmith.assay.diagnosis.experiments.isolate import order
from goldsmith.assay.probes import QUICK as PROBES

pytestmark = pytest.mark.sweep(8)

QUICK = frozenset(PROBES)


@assay.case(P=[14], D=[5], E=[4])
def routed(make, P, D, E):
    return {"x": make.normal(P, D), "owner": make.integers(0, E, P), "w": make.normal(E, D, D)}


def routed_golden(x, owner, w):
    """Rows go to their owner's matrix, sorted by owner, and back."""
    g = assay.stage("g", torch.bmm(x.unsqueeze(1), w[owner]).squeeze(1))
    by_owner = torch.sort(owner, stable=True).indices
    h = assay.stage("h", torch.tanh(g))
    return (h * h).index_select(0, by_owner), g


def routed_kernel(slope):
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, owner, w):
            y, g = routed_golden(x, owner, w)
            ctx.save_for_backward(x, owner, w, g)
            ctx.mark_non_differentiable(g)
            return y, g

        @staticmethod
        def backward(ctx, dy, _):
            x, owner, w, g = ctx.saved_tensors
            by_owner = torch.sort(owner, stable=True).indices
            dg = slope(torch.zeros_like(dy).index_copy(0, by_owner, dy), g, by_owner)
            dw = torch.zeros_like(w).index_add(0, owner, x.unsqueeze(2) * dg.unsqueeze(1))
            return torch.bmm(dg.unsqueeze(1), w[owner].mT).squeeze(1), None, dw

    return lambda x, owner, w: Kernel.apply(x, owner, w)


def routed_target(slope):
    return assay.Target(routed_kernel(slope), routed_golden, cases=routed, outputs=("y", "g"), saved=("g",))


def right(d, g, by_owner):
    h = torch.tanh(g)
    return d * 2 * h * (1 - h * h)


READS = {
    "g in place of h": ("wrong_saved_tensor", lambda d, g, o: d * 2 * g * (1 - g * g)),
}


@pytest.mark.parametrize("text", READS)
def test_a_wrong_tensor_read_by_the_backward(text):
    cause, slope = READS[text]
    examination = session_of(routed_target(slope))
    changes = explain(examination, "x.grad", examination.first.grads["x.grad"], examination.first)
    assert any(w.exact and w.whole and w.cause == cause and text in w.text for w in changes), changes


def test_the_right_backward_is_not_explained():
    examination = session_of(routed_target(right))
    assert not examination.bad
    assert explain(examination, "x.grad", examination.first.grads["x.grad"], examination.first) == []


def test_saved_tensors_are_ordered_by_their_stage():
    names = order(*(lambda s: (s.ref, s.first))(session_of(routed_target(right))))
    assert names.index("g") < names.index("saved.g") < names.index("h") < names.index("y")


@assay.case(T=[7], D=[9])
def rows(make, T, D):
    return {"x": make.normal(T, D), "b": make.normal(D)}


def turned(x, first=0):
    return x * torch.arange(first, first + len(x), dtype=x.dtype).cos().unsqueeze(1)


ELSEWHERE = {
    "the limits of clamp": ("wrong_mask", lambda x, b: x.clamp(max=0.5) * b, lambda x, b: x * b),
    "sigmoid(x) stands in place of silu(x)": (
        "wrong_factor", lambda x, b: torch.nn.functional.silu(x) * b, lambda x, b: torch.sigmoid(x) * b,
    ),
    "cumsum(x) runs along axis 1 instead of 0": (
        "wrong_axis", lambda x, b: x.cumsum(0) + b, lambda x, b: x.cumsum(1) + b,
    ),
    "the result of mean(square(x)) is shifted by 1": (
        "shifted", lambda x, b: x / x.square().mean(1, True), lambda x, b: x / x.square().mean(1, True).roll(1, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", ELSEWHERE)
def test_a_forward_that_reads_from_a_wrong_place(text):
    cause, golden, kernel = ELSEWHERE[text]
    examination = session_of(assay.Target(kernel, golden, cases=rows))
    changes = explain(examination, "y", examination.first.outputs["y"], examination.first)
    spoken = text.replace("square(x)", "pow(x)")
    assert any(w.exact and w.cause == cause and (text in w.text or spoken in w.text) for w in changes), changes


def test_one_element_with_a_tiny_bound_does_not_decide():
    """The first row of a cumulative sum is exact: its error outweighs all others and says nothing about them."""
    examination = session_of(assay.Target(lambda x, b: x.cumsum(0) - x, lambda x, b: x.cumsum(0), cases=rows))
    changes = explain(examination, "y", examination.first.outputs["y"], examination.first)
    assert not [w for w in changes if w.exact and w.whole and w.cause == "overwritten_accumulator"], changes


def test_moved_rows_are_not_a_mask():
    def kernel(x, b):
        return x / x.square().mean(1, keepdim=True).roll(2, 0) * b

    def golden(x, b):
        return x / x.square().mean(1, keepdim=True) * b

    examination = session_of(assay.Target(kernel, golden, cases=rows, backward=None))
    influences = influence(examination, {"y"})["x[0]"]
    assert influences.extra == ((0, 6),) and not influences.elsewhere  # each row still reaches itself
    moved = session_of(assay.Target(lambda x, b: golden(x, b).roll(2, 0), golden, cases=rows, backward=None))
    influences = influence(moved, {"y"})["x[0]"]
    assert influences.missing == ((0, 6),) or influences.none or influences.elsewhere


def failing(target):
    report, examinations = examine(target, [target.cases[0]], torch.float32, "cpu", 0, QUICK, None, until_failing=True)
    return examinations[0], begin(examinations[0], report)


def test_a_trial_that_fails_elsewhere_is_not_repeated():
    examination, evidence = failing(layer("h"))
    collect(examination, evidence, wanted="p")
    assert evidence.first_wrong == "h" and not evidence.runs and evidence.got is None
    collect(examination, evidence, wanted="h")
    assert evidence.runs and evidence.got is not None


def test_zeros_at_some_negative_places_are_no_padded_maximum():
    """A term is missing where the rest is zero: zeros there, and other negative numbers are right."""

    def golden(x, b):
        return torch.where(x > 1, -x, 0.0) - torch.where(x > 1, 0.0, b.exp())

    def kernel(x, b):
        return torch.where(x > 1, -x, 0.0)

    examination, evidence = failing(assay.Target(kernel, golden, cases=rows, backward=None))
    collect(examination, evidence)
    by_cause = matches(replace(evidence, whatif=[]))
    assert bool((evidence.got[evidence.golden < 0] != 0).any())
    assert "zero wherever the golden is negative" not in str(by_cause.get("wrong_mask"))
