"""Changed goldens: scalars of the case, pieces of a tensor, other operands, functions, fused torch functions."""

import math

import pytest
import torch
from torch.nn import functional as F

from assay.diagnosis.targets import explain, session_of
from goldsmith import assay

pytestmark = pytest.mark.sweep(8)


def explained(candidate, golden, case, **declared):
    """The best explanation of the first wrong result, and its tensor."""
    diagnosis = assay.diagnose(assay.Target(candidate, golden, cases=case, **declared), budget_s=None)
    assert diagnosis.evidence is not None and diagnosis.evidence.whatif, (
        f"nothing explains {diagnosis.first_wrong_stage}"
    )
    return diagnosis


def best(candidate, golden, case, tensor="y", **declared):
    examination = session_of(assay.Target(candidate, golden, cases=case, **declared), ("values", "ensemble"))
    changes = explain(
        examination, tensor, dict(examination.first.outputs, **examination.first.grads)[tensor], examination.first
    )
    assert changes, f"nothing explains {tensor}"
    return changes[0]


# scalars of the case: a moving average with bias correction, as in an optimiser


@assay.case(N=[37])
def steps(make, N):
    return {"g": make.normal(N), "m": make.normal(N), "b1": 0.9, "b2": 0.98, "t": 3}


def average(g, m, b1, b2, t):
    return (b1 * m + (1 - b1) * g) / (1 - b2**t)


@pytest.mark.parametrize(
    "candidate, cause, text",
    [
        (lambda g, m, b1, b2, t: average(g, m, b1, b1, t), "wrong_factor", "b1 is read in place of b2"),
        (lambda g, m, b1, b2, t: average(g, m, b2, b1, t), "swapped_results", "b1 and b2 are exchanged"),
        (lambda g, m, b1, b2, t: average(g, m, 1 - b1, b2, t), "wrong_factor", "b1 counts as 1 - b1"),
        (lambda g, m, b1, b2, t: average(g, m, b1, b2, t - 1), "off_by_one", "t is 2, one too low"),
    ],
)
def test_a_number_of_the_case_is_taken_for_another(candidate, cause, text):
    change = best(candidate, average, steps)
    assert (change.cause, change.text, change.exact) == (cause, text, True)


# pieces of one product: the gates of a recurrent cell


@assay.case(B=[5], H=[8])
def cells(make, B, H):
    return {"z": make.normal(B, 4 * H), "c": make.normal(B, H)}


def cell(z, c, order=(0, 1, 2, 3), old=False):
    i, f, g, o = (z.chunk(4, -1)[k] for k in order)
    new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c if old else new)


def sliced(z, c):
    n = c.shape[-1]
    i, f, g, o = (z[:, k * n : (k + 1) * n] for k in range(4))
    return torch.sigmoid(o) * torch.tanh(torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g))


def test_an_operator_reads_the_state_from_before_its_update():
    change = best(lambda z, c: cell(z, c, old=True), cell, cells)
    assert change.cause == "wrong_saved_tensor" and "reads c in place of" in change.text
    assert "stale_state" in change.also


# functions


@assay.case(N=[9], D=[64])
def rows(make, N, D):
    return {"x": make.normal(N, D), "w": make.normal(D) + 2, "b": make.normal(D)}


def quantised(x, w, b, *, to=torch.round, top=127):
    s = x.abs().amax(-1, keepdim=True) / top
    return to(x / s) * s


@pytest.mark.parametrize(
    "candidate, golden, cause, text",
    [
        (lambda x, w, b: quantised(x, w, b, to=torch.trunc), quantised, "truncating_store", "trunc stands where"),
        (lambda x, w, b: quantised(x, w, b, top=128), quantised, "wrong_factor", "128 stands for 127"),
        (lambda x, w, b: F.silu(x) * w, lambda x, w, b: F.gelu(x) * w, "wrong_factor", "silu stands where"),
        (lambda x, w, b: torch.sqrt(x * x + w * w), lambda x, w, b: x * x + w * w, "wrong_factor", "sqrt is taken of"),
        (lambda x, w, b: x * (1 + w), lambda x, w, b: x * w, "wrong_factor", "w is taken with one added"),
    ],
)
def test_another_function_in_place_of_the_goldens_is_named(candidate, golden, cause, text):
    change = best(candidate, golden, rows, backward=None)
    assert change.cause == cause and text in change.text


# fused torch functions


def normalised(x, w, b, *, centred=True, count=0, eps=1e-3):
    c = x - x.mean(-1, keepdim=True) if centred else x
    return c * torch.rsqrt(c.square().sum(-1, keepdim=True) / (x.shape[-1] - count) + eps) * w + b


def layer_norm(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b, 1e-3)


@assay.case(B=[2], T=[9], D=[8])
def heads(make, B, T, D):
    return {"q": make.normal(B, T, D), "k": make.normal(B, T, D), "v": make.normal(B, T, D)}


def attend(q, k, v, *, scale=None, masked=-torch.inf, axis=-1):
    s = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), masked)
    return s.softmax(axis) @ v


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@assay.case(N=[7], V=[20])
def tokens(make, N, V):
    return {"z": make.normal(N, V), "t": make.integers(0, V, N)}


@pytest.mark.parametrize(
    "candidate, golden, case, cause",
    [
        (lambda x, w, b: normalised(x, w, b, centred=False), layer_norm, rows, "missing_term"),
        (lambda x, w, b: normalised(x, w, b, count=8), layer_norm, rows, "wrong_factor"),
        (lambda q, k, v: attend(q, k, v, scale=1.0), attention, heads, "wrong_factor"),
        (lambda q, k, v: attend(q, k, v, masked=0.0), attention, heads, "wrong_mask"),
        (lambda q, k, v: attend(q, k, v, axis=-2).nan_to_num(), attention, heads, "wrong_axis"),
        (
            lambda z, t: -z.gather(1, t[:, None])[:, 0].mean(),
            lambda z, t: F.cross_entropy(z, t),
            tokens,
            "missing_term",
        ),
    ],
)
def test_a_mistake_inside_a_fused_torch_function(candidate, golden, case, cause):
    assert explained(candidate, golden, case).causes[0].id == cause


@pytest.mark.parametrize(
    "written, golden, case",
    [
        (lambda x, w, b: normalised(x, w, b), layer_norm, rows),
        (attend, attention, heads),
        (
            lambda x, w, b: (x - x.mean(0)) * torch.rsqrt(x.var(0, unbiased=False) + 1e-5) * w + b,
            lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
            rows,
        ),
    ],
)
def test_correct_functions_pass(written, golden, case):
    assert assay.diagnose(assay.Target(written, golden, cases=case)).ok


# the order in which results are computed, and inputs that the golden does not use there


def update(p, g, v, *, decayed=False):
    g = g + 0.5 * p if decayed else g
    new = 0.75 * v + g * g
    return p - 0.125 * g * torch.rsqrt(new + 1e-6), new


@assay.case(N=[50])
def parameters(make, N):
    return {"p": make.normal(N), "g": make.normal(N), "v": make.uniform(N)}


def test_the_first_wrong_result_is_the_one_computed_first():
    diagnosis = assay.diagnose(
        assay.Target(
            lambda p, g, v: update(p, g, 1.5 * v), update, cases=parameters, outputs=("p_new", "v_new"), backward=None
        )
    )
    assert (diagnosis.first_wrong_stage, diagnosis.causes[0].id) == ("v_new", "wrong_factor")


def test_a_mask_that_one_of_its_readers_does_not_apply():
    def pooled(x, kept, *, counted=True):
        shares = kept if counted else torch.ones_like(kept)
        return (x * kept[:, None]).sum(0) / shares.sum()

    case = {"x": torch.randn(9, 4), "kept": (torch.arange(9) % 3 > 0).float()}
    change = best(lambda x, kept: pooled(x, kept, counted=False), lambda x, kept: pooled(x, kept), case, backward=None)
    assert (change.cause, change.text, change.exact) == (
        "wrong_mask",
        "kept is not applied where sum(kept) reads it",
        True,
    )
