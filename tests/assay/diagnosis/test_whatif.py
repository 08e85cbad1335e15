"""A golden with one line changed reproduces the candidate: the search finds that change and no other."""

import math

import pytest
import torch

from assay.diagnosis.targets import adapter, explain, layer, session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.driver import diagnose
from goldsmith.assay.diagnosis.experiments.isolate import named

pytestmark = pytest.mark.sweep(8)


@assay.case(T=[7], D=[21])
def square_case(make, T, D):
    return {"x": make.normal(T, D), "v": make.normal(T, D), "w": make.normal(D, D), "eps": 1e-3}


def golden(x, v, w, eps):
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    s = (x * scale) @ w.mT / math.sqrt(x.shape[1])
    return torch.softmax(s, -1) * v + x


def attended(x, v, w, eps, *, n=21, by=None, inner=None, tail=0, dim=-1, outside=False):
    mean = x[:, :n].square().sum(-1, keepdim=True) / n if dim == -1 else x.square().mean(dim, keepdim=True)
    scale = 1 / (mean.sqrt() + eps) if outside else torch.rsqrt(mean + eps)
    s = (x * scale) @ (w if inner == "untransposed" else w.mT) / (by or math.sqrt(x.shape[1]))
    e = torch.exp(s - s.amax(-1, keepdim=True))
    total = e.sum(-1, keepdim=True) + tail * torch.exp(-s.amax(-1, keepdim=True))
    return e / total * v + x


FAULTS = {
    "a short mean": ("truncated_reduction", lambda x, v, w, eps: attended(x, v, w, eps, n=16)),
    "another scale": ("wrong_factor", lambda x, v, w, eps: attended(x, v, w, eps, by=21.0)),
    "an operand as it is": ("transposed", lambda x, v, w, eps: attended(x, v, w, eps, inner="untransposed")),
    "a tail of zeros": ("wrong_mask", lambda x, v, w, eps: attended(x, v, w, eps, tail=11)),
    "a mean over rows": ("wrong_axis", lambda x, v, w, eps: attended(x, v, w, eps, dim=0)),
    "two inputs exchanged": ("swapped_results", lambda x, v, w, eps: attended(v, x, w, eps)),
    "a sign": ("sign_flip", lambda x, v, w, eps: attended(x, v, w, eps) - 2 * x),
    "a term": ("missing_term", lambda x, v, w, eps: attended(x, v, w, eps) - x),
    "a factor": ("wrong_factor", lambda x, v, w, eps: (attended(x, v, w, eps) - x) / v + x),
    "eps outside": ("absolute_eps", lambda x, v, w, eps: attended(x, v, w, eps, outside=True)),
    "rows one on": ("shifted", lambda x, v, w, eps: attended(x, v.roll(1, 0), w, eps)),
}


def explained(kernel, case=square_case, reference=golden, **more):
    examination = session_of(assay.Target(kernel, reference, cases=case, backward=None, **more), ("values", "ensemble"))
    return explain(examination, "y", examination.first.outputs["y"], examination.first)


@pytest.mark.parametrize("name", FAULTS)
def test_the_change_that_makes_the_result_is_found(name):
    cause, kernel = FAULTS[name]
    best = explained(kernel)[0]
    assert best.cause == cause and best.exact and best.whole, best
    assert best.match > 0.9999


@pytest.mark.parametrize("name", ["another scale", "a tail of zeros", "an operand as it is"])
def test_it_is_the_best_cause_of_the_diagnosis(name):
    cause, kernel = FAULTS[name]
    causes = diagnose(assay.Target(kernel, golden, cases=square_case), probes="quick").causes
    assert causes[0].id == cause and "the golden makes this y when" in causes[0].evidence[0]


def test_a_fitted_number_gets_a_name():
    every = explained(lambda x, v, w, eps: attended(x, v, w, eps, by=21 * math.sqrt(21)))
    sentence = {w.params["named"]: w.params["value"] for w in every if "value" in w.params}
    assert sentence["1/D"] == pytest.approx(1 / 21, rel=1e-3), every


def test_an_unrelated_error_has_no_explanation():
    noise = torch.randn(7, 21, generator=torch.Generator().manual_seed(3))
    assert explained(lambda x, v, w, eps: golden(x, v, w, eps) + 0.1 * noise) == []
    assert explained(lambda x, v, w, eps: golden(x, v, w, eps)) == []


def test_zeros_need_no_change_to_explain_them():
    assert explained(lambda x, v, w, eps: 0 * golden(x, v, w, eps)) == []


def test_a_change_of_a_part_is_reported_as_partial():
    def kernel(x, v, w, eps):
        return torch.cat([golden(x, v, w, eps)[:4], FAULTS["a sign"][1](x, v, w, eps)[4:]])

    best = explained(kernel)[0]
    assert best.cause == "sign_flip" and not best.whole and "in the wrong part alone" in best.text


@pytest.mark.parametrize(
    "read, cause",
    [
        (lambda i, n: i % n, "invalid_index"),
        (lambda i, n: i.clamp(min=0), "invalid_index"),
    ],
)
def test_indices_out_of_range_are_followed(read, cause):
    @assay.case(T=[40], E=[5])
    def some(make, T, E):
        return {"x": make.normal(T, 6), "owner": make.integers(-1, E, T), "E": E}

    def reference(x, owner, E):
        return x.new_zeros(E, 6).index_add(0, owner[owner >= 0], x[owner >= 0])

    best = explained(lambda x, owner, E: x.new_zeros(E, 6).index_add(0, read(owner, E), x), some, reference)[0]
    assert best.cause == cause


def test_a_mask_that_is_shifted():
    @assay.case(S=[12])
    def scores(make, S):
        return {"s": make.normal(S, S), "v": make.normal(S, 4)}

    def causal(s, v, diagonal=0):
        mask = torch.ones_like(s, dtype=torch.bool).tril(diagonal)
        return torch.softmax(s.masked_fill(~mask, -math.inf), -1) @ v

    assert explained(lambda s, v: causal(s, v, 1), scores, causal)[0].cause == "mask_shift"


def test_changes_apply_to_the_backward():
    examination = session_of(adapter("missing", named=False))
    best = explain(examination, "x.grad", examination.first.grads["x.grad"], examination.first)[0]
    assert best.cause == "missing_term" and best.exact and best.others == 1.0


def test_a_tensor_that_the_backward_should_not_read():
    class Silu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            y = torch.nn.functional.silu(a)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, g):
            (a,) = ctx.saved_tensors
            s = torch.sigmoid(a)
            return g * s * (1 + a * (1 - s))

    case = {"a": torch.randn(5, 6, generator=torch.Generator().manual_seed(1))}
    examination = session_of(assay.Target(lambda a: Silu.apply(a), lambda a: torch.nn.functional.silu(a), cases=case))
    best = explain(examination, "a.grad", examination.first.grads["a.grad"], examination.first)[0]
    assert best.cause == "wrong_saved_tensor" and best.params["by"] == "silu(a)"


def test_only_the_requested_causes_are_tried():
    examination = session_of(layer("h"))
    got = named(examination.first)["h"][1]
    assert explain(examination, "h", got, examination.first, causes=frozenset(["sign_flip"])) == []
    assert explain(examination, "h", got, examination.first, causes=frozenset(["truncated_reduction"]))[0].params[
        "missing"
    ]


def test_the_search_respects_its_time_limit():
    examination = session_of(layer("h"))
    assert explain(examination, "h", named(examination.first)["h"][1], examination.first, spent=lambda: True) == []
