"""State that only interleaved calls show, and gradients in a buffer that a later backward overwrites."""

import pytest
import torch

from assay.kernels import target
from goldsmith import assay
from goldsmith.assay.execute import hooks
from goldsmith.assay.execute.records import RunSettings
from goldsmith.assay.execute.run import execute
from goldsmith.assay.judge.examination import Examination

KEPT = ("module", "shape", "call")  # where the backward keeps its values; only the last one is right


@assay.case(T=[4], D=[16])
def scaled(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}


def product(x, w):
    return x * w


def function(kept, handed=False):
    """x * w with its own backward; handed: the gradient of w lies in a buffer cached by shape."""
    module, workspace, gradients = {}, {}, {}

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            if kept == "call":
                ctx.save_for_backward(x, w)
            else:
                mine = workspace.setdefault(tuple(x.shape), torch.empty(x.shape)).copy_(x)
                module["x"] = x.clone()
                ctx.x, ctx.w = (mine if kept == "shape" else None), w.clone()
            return x * w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors if kept == "call" else (module["x"] if ctx.x is None else ctx.x, ctx.w)
            return g * w, buffered(gradients, (g * x).sum(0), handed)

    return target(Kernel.apply, product, scaled)


def buffered(buffers, grad, handed):
    return buffers.setdefault(tuple(grad.shape), torch.empty(grad.shape)).copy_(grad) if handed else grad


def callables(kept, handed=False):
    """The same with `backward=`; kept by shape, the saved output lies in a workspace."""
    module, workspace, gradients = {}, {}, {}

    def forward(x, w):
        module["x"] = x.clone()
        mine = workspace.setdefault(tuple(x.shape), torch.empty(x.shape))
        return x * w, (mine if kept == "shape" else torch.empty(x.shape)).copy_(x)

    def backward(w, h, grad_y):
        x = module["x"] if kept == "module" else h
        return grad_y * w, buffered(gradients, (grad_y * x).sum(0), handed)

    def golden(x, w):
        return x * w, x * 1

    return target(forward, golden, scaled, backward=backward, outputs=("y", "h"), saved=("h",))


MAKERS = pytest.mark.parametrize("make", [function, callables])


@MAKERS
@pytest.mark.parametrize("kept", KEPT)
def test_the_next_forward_must_not_overwrite_values_of_the_backward(make, kept):
    report = assay.check(make(kept), raises=False)
    reported = {(f.probe, f.rung) for f in report.findings if "between forward and backward" in f.text}
    assert reported == (set() if kept == "call" else {("second_call", "CERTAIN")}), str(report)
    assert report.ok == (kept == "call")
    assert not any("the backward modified" in f.text for f in report.findings)  # the call in between modified it


@MAKERS
def test_a_later_backward_must_not_overwrite_a_gradient(make):
    report = assay.check(make("call", handed=True), raises=False)
    (finding,) = report.findings
    assert (finding.probe, finding.tensor) == (
        "second_call",
        "w.grad",
    ) and "overwrote what the first returned" in finding.text


def test_the_diagnosis_names_state_and_shared_memory_and_the_gradient():
    state, shared = assay.diagnose(function("module")), assay.diagnose(function("call", handed=True))
    assert state.causes[0].id == "stale_state" and shared.causes[0].id == "aliased"
    assert state.first_wrong_stage in ("x.grad", "w.grad") and shared.first_wrong_stage == "w.grad"
    assert any("save_for_backward" in line for line in state.causes[0].evidence)


def test_an_exception_in_interleaved_calls_is_reported():
    open_calls = []

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            if open_calls:
                raise RuntimeError("the last forward still waits for its backward")
            ctx.save_for_backward(x, w)
            open_calls.append(1)
            return x * w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            if open_calls:
                open_calls.pop()
            return g * w, (g * x).sum(0)

    one = target(Kernel.apply, product, scaled, reset=open_calls.clear)
    report = assay.check(one, probes="second_call", raises=False)
    assert any("still waits" in f.text for f in report.findings), str(report)


def test_reset_is_not_called_between_repeated_calls():
    runs = []
    one = target(product, product, scaled, reset=lambda: runs.append("reset"))
    starts = []
    hooks.RUNS.append(lambda case, probe, run: starts.append((run, len(runs))))
    try:
        assay.check(one, probes=["second_call", "repeats"])
    finally:
        hooks.RUNS.pop()
    again = [count for run, count in starts if run in ("second_call", "interleaved", "back")]
    assert again == [1] * 3  # one for the first run
    assert len(runs) == 3  # and one each for the repeat and for the run with other threads


def test_a_call_in_between_does_not_change_the_random_numbers():
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * torch.rand_like(g)

    one = target(Noise.apply, lambda x: x * 1, {"x": torch.randn(8)})
    examination = Examination(one, one.cases[0], torch.float32, "cpu", 0, frozenset(["values"]), "given")
    plain = execute(examination.material, RunSettings())
    drawn = execute(examination.material, RunSettings(between=examination.variant(1)))
    assert torch.equal(plain.grads["x.grad"], drawn.grads["x.grad"])


class _LastRow(torch.autograd.Function):
    """Rows of w, whose backward keeps the last of several gradients of a row instead of their sum."""

    @staticmethod
    def forward(ctx, w, i):
        ctx.save_for_backward(w, i)
        return w[i]

    @staticmethod
    def backward(ctx, g):
        w, i = ctx.saved_tensors
        grad = torch.zeros_like(w)
        grad[i] = g
        return grad, None


@assay.case(T=[3], V=[10**4], D=[2])
def rows(make, T, V, D):
    return {"w": make.normal(V, D), "i": make.integers(0, V, T)}


def test_other_inputs_hold_an_index_twice():
    report = assay.check(
        assay.Target(_LastRow.apply, lambda w, i: w[i], cases=rows), probes=["values", "second_call"], raises=False
    )
    assert {f.tensor for f in report.findings} == {"w.grad"}, report
