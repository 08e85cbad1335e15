"""Changes of several operators at once, and the end of the search."""

import pytest
import torch

from assay.diagnosis.targets import adapter, layer, session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.driver import diagnose
from goldsmith.assay.diagnosis.search import offers, search
from goldsmith.assay.diagnosis.search.engine import Search
from goldsmith.assay.execute import hooks

pytestmark = pytest.mark.sweep(8)

_MOST = 300  # runs of the candidate that a diagnosis may use


def search_of(target, tensor="y"):
    """The explanations of the tensor, and the number of changes tried."""
    examination = session_of(target, ("values", "ensemble"))
    got = dict(examination.first.outputs, **examination.first.grads)[tensor]
    session = search(examination, tensor, got, examination.first)
    count = 0
    plain = Search._try

    def counted(self, change):
        nonlocal count
        count += 1
        return plain(self, change)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Search, "_try", counted)
        return session.run(lambda: False), count


@assay.case(T=[7], D=[10], E=[3])
def experts(make, T, D, E):
    return {"x": make.normal(T, D), "w": make.normal(E, D, D), "b": make.normal(D)}


@assay.case(T=[6], D=[9])
def logits(make, T, D):
    return {"x": make.normal(T, D)}


def mixed(times):
    def forward(x, w, b):
        y = x * b
        for e in range(w.shape[0]):
            y = y + times * (x @ w[e])
        return y

    return forward


def test_products_of_a_loop_that_count_several_times():
    change, _ = search_of(assay.Target(mixed(3), mixed(1), cases=experts, backward=None))
    assert change[0].cause == "repeated_term" and change[0].exact, change
    assert change[0].params["value"] == pytest.approx(3, rel=1e-4)


@assay.case(T=[6], D=[8], R=[3])
def twice_low(make, T, D, R):
    return {"x": make.normal(T, D), "a": make.normal(2, D, R), "b": make.normal(2, R, D), "w": make.normal(2, D, D)}


def through(x, a, b, w):
    for i, scale in enumerate((0.4, 1.7)):
        x = torch.tanh(x @ w[i] + scale * (x @ a[i] @ b[i]))
    return x


def without_scale(x, a, b, w, grad_y):
    kept = []
    for i, scale in enumerate((0.4, 1.7)):
        kept.append(x)
        x = torch.tanh(x @ w[i] + scale * (x @ a[i] @ b[i]))
        kept.append(x)
    for i in (1, 0):
        dz = grad_y * (1 - kept[2 * i + 1] ** 2)
        grad_y = dz @ w[i].mT + dz @ b[i].mT @ a[i].mT  # the scale is missing in both turns
    return {"x": grad_y}


def test_a_factor_that_is_dropped_in_the_gradient_of_one_line():
    target = assay.Target(through, through, cases=twice_low, backward=without_scale, grads=("x",))
    best = search_of(target, "x.grad")[0][0]
    assert (best.cause, best.exact, best.whole) == ("wrong_factor", True, True), best
    assert "in 2 places" in best.text


def test_a_norm_along_another_axis():
    def of(dim):
        return lambda x: x / x.norm(dim=dim, keepdim=True)

    @assay.case(T=[7], D=[9])
    def rows(make, T, D):
        return {"x": make.normal(T, D)}

    best = search_of(assay.Target(of(0), of(1), cases=rows, backward=None))[0][0]
    assert best.cause == "wrong_axis" and best.exact and best.params["axis"] == 0


def test_the_search_ends_when_a_common_change_explains_everything():
    noise = torch.randn(6, 12, generator=torch.Generator().manual_seed(1))
    golden, cases = layer().golden, layer().cases

    def kernel(more):
        return lambda x, w, b: 2 * torch.softmax(x @ w, -1) + more

    _, all_of_them = search_of(assay.Target(kernel(noise), golden, cases=cases, backward=None))
    change, few = search_of(assay.Target(kernel(0), golden, cases=cases, backward=None))
    assert change[0].cause == "missing_term" and few < all_of_them / 2, (few, all_of_them)


@pytest.mark.parametrize("table", ["_KINDS", "_OF_A_NODE"])
def test_a_kind_of_change_that_raises_is_reported_and_the_others_are_tried(table, monkeypatch):
    def stumbles(*arguments):
        raise RuntimeError("a view of two axes")

    entry = ("padding", stumbles, "graph") if table == "_KINDS" else ("padding", stumbles)
    monkeypatch.setattr(offers, table, (entry, *getattr(offers, table)))
    target = assay.Target(lambda x: (x + x.sin()).tanh(), lambda x: (x + x.sin() + x.exp()).tanh(), cases=logits)
    diagnosis = diagnose(target, budget_s=600)
    assert diagnosis.causes[0].id == "missing_term" and diagnosis.evidence.whatif[0].exact
    assert "a view of two axes" in " ".join(diagnosis.undecided)


@pytest.mark.parametrize("target", [layer("h"), adapter("saved")], ids=lambda t: t.name)
def test_a_diagnosis_stays_within_its_number_of_runs(target):
    runs = []
    hooks.RUNS.append(lambda *run: runs.append(run))
    try:
        diagnosis = diagnose(target)
    finally:
        hooks.RUNS.pop()
    assert diagnosis.verdict == "fail" and not diagnosis.partial
    assert 20 < len(runs) <= _MOST, len(runs)
