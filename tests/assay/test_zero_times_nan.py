"""A golden that gathers after a selection: 0 * NaN in the backward of unchosen rows is not the candidate's fault."""

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.golden import zero_times_nan


@assay.case(T=[7], D=[5], k=[3])
def tokens(make, T, D, k):
    return {"x": make.normal(T, D), "route": make.normal(D), "w": make.normal(D, D, std=D**-0.5), "k": k}


def depth(x, route, w, k):
    """A mixture of depths: the k best tokens go through w, gated by all scores; the others pass unchanged."""
    score = assay.stage("score", x @ route)
    index = assay.stage("index", score.topk(k).indices.sort().values)
    gate = torch.sigmoid(score[index])
    return x.index_add(0, index, gate[:, None] * (x[index] @ w)), index


class Chosen(torch.autograd.Function):
    """The backward touches only the chosen rows."""

    swallows = False

    @staticmethod
    def forward(ctx, x, route, w, index):
        ctx.save_for_backward(x, route, w, index)
        return x.index_add(0, index, torch.sigmoid(x[index] @ route)[:, None] * (x[index] @ w))

    @staticmethod
    def backward(ctx, dy):
        x, route, w, index = ctx.saved_tensors
        h, g = x[index], dy[index]
        gate, u = torch.sigmoid(h @ route), h @ w
        dscore = (g * u).sum(1) * gate * (1 - gate)
        du = gate[:, None] * g
        part = du @ w.mT + dscore[:, None] * route
        part = torch.nan_to_num(part) if Chosen.swallows else part
        return dy.index_add(0, index, part), h.mT @ dscore, h.mT @ du, None


def kernel(x, route, w, k):
    index = assay.stage("index", assay.stage("score", x.detach() @ route.detach()).topk(k).indices.sort().values)
    return Chosen.apply(x, route, w, index), index


def target(declared):
    choice = {"index": assay.topk(scores="score", k="k", ordered=False)} if declared else {}
    return assay.Target(kernel, depth, cases=tokens, outputs=("y", "index"), decisions=choice)


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
@pytest.mark.parametrize("seed", range(3))
def test_a_kernel_that_never_reads_unchosen_rows_passes(declared, seed):
    report = assay.check(target(declared), probes=("scaling",), seed=seed, raises=False)
    assert report.ok, str(report)


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
def test_a_kernel_that_swallows_nan_in_chosen_rows_is_found(declared, monkeypatch):
    monkeypatch.setattr(Chosen, "swallows", True)
    report = assay.check(target(declared), probes=("scaling",), raises=False)
    messages = [f.text for f in report.findings]
    assert messages and messages[0].startswith("values:nan is swallowed: x.grad is finite where the golden is not"), (
        messages
    )


def test_zero_times_nan_is_zero_and_any_other_number_times_nan_is_nan():
    nan = torch.nan

    def gradient(leaves):
        a, b = leaves["a"], leaves["b"]
        return {"product": a @ b, "a.grad": a @ b, "b.grad": a[0] * b[:, 0]}

    leaves = {"a": torch.tensor([[0.0, 2.0], [3.0, 0.0]]), "b": torch.tensor([[nan, 1.0], [1.0, nan]])}
    gradients = zero_times_nan.gradients(gradient, leaves)
    assert set(gradients) == {"a.grad", "b.grad"}
    assert gradients["a.grad"].isnan().tolist() == [[False, True], [True, False]]
    assert gradients["a.grad"][0, 0] == 2 and gradients["a.grad"][1, 1] == 3
    assert gradients["b.grad"].tolist() == [0.0, 2.0]


@assay.case(T=[5], D=[6], H=[9])
def hidden(make, T, D, H):
    return {"x": make.normal(T, D), "up": make.normal(D, H), "down": make.normal(H, D)}


@pytest.mark.parametrize("passes_on", [True, False], ids=["relu", "clamp"])
def test_both_slopes_of_a_relu_at_nan_are_right(passes_on):
    def relu(x, up, down):
        return torch.relu(x @ up) @ down

    def clamp(x, up, down):
        return (x @ up).clamp(min=0) @ down

    golden, kernel = (clamp, relu) if passes_on else (relu, clamp)
    for seed in range(4):
        report = assay.check(assay.Target(kernel, golden, cases=hidden), probes=("scaling",), seed=seed, raises=False)
        assert report.ok, str(report)
