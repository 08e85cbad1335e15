"""Fused derivatives, borders of groups and integer inputs: each mistake has its own change."""

import pytest
import torch

from assay.diagnosis.targets import explain, session_of
from goldsmith import assay

pytestmark = pytest.mark.sweep(8)


def density(x):
    return torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5


def inner(g, y, dim=-1):
    return (g * y).sum(dim, keepdim=True)


SLOPES = [
    ("softmax", "sign_flip", "adds its inner product", lambda g, y, x: y * (g + inner(g, y))),
    ("softmax", "missing_term", "lacks its inner product", lambda g, y, x: y * g),
    ("softmax", "wrong_factor", "lacks the factor of the probabilities", lambda g, y, x: g - inner(g, y)),
    ("softmax", "wrong_factor", "sums without the probabilities", lambda g, y, x: y * (g - g.sum(-1, keepdim=True))),
    ("softmax", "wrong_axis", "sums along another axis", lambda g, y, x: y * (g - inner(g, y, 0))),
    ("sigmoid", "wrong_factor", "lacks the factor y", lambda g, y, x: g * (1 - y)),
    ("sigmoid", "wrong_factor", "lacks the factor 1 - y", lambda g, y, x: g * y),
    ("sigmoid", "sign_flip", "has 1 + y in place of 1 - y", lambda g, y, x: g * y * (1 + y)),
    ("sigmoid", "wrong_factor", "is not applied", lambda g, y, x: g.clone()),
    ("tanh", "wrong_factor", "has 1 - y in place of 1 - y^2", lambda g, y, x: g * (1 - y)),
    ("tanh", "sign_flip", "has 1 + y^2 in place of 1 - y^2", lambda g, y, x: g * (1 + y * y)),
    ("silu", "missing_term", "lacks the slope of the sigmoid", lambda g, y, x: g * x.sigmoid()),
    ("silu", "missing_term", "lacks the sigmoid itself", lambda g, y, x: g * x * x.sigmoid() * (1 - x.sigmoid())),
    ("silu", "wrong_factor", "is not applied", lambda g, y, x: g.clone()),
    ("gelu", "missing_term", "lacks the density", lambda g, y, x: g * 0.5 * (1 + torch.erf(x / 2**0.5))),
    ("gelu", "missing_term", "lacks the distribution itself", lambda g, y, x: g * x * density(x)),
    (
        "gelu",
        "wrong_factor",
        "lacks the factor x",
        lambda g, y, x: g * (0.5 * (1 + torch.erf(x / 2**0.5)) + density(x)),
    ),
    ("softplus", "wrong_factor", "has the slope of the sigmoid", lambda g, y, x: g * x.sigmoid() * (1 - x.sigmoid())),
    ("silu", "wrong_factor", "lacks the factor x", lambda g, y, x: g * x.sigmoid() * (2 - x.sigmoid())),
    ("silu", "sign_flip", "other sign in its slope", lambda g, y, x: g * x.sigmoid() * (1 - x * (1 - x.sigmoid()))),
]
FORWARD = {
    "softmax": lambda x: torch.softmax(x, -1), "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "silu": lambda x: torch.nn.functional.silu(x), "gelu": lambda x: torch.nn.functional.gelu(x),
    "softplus": lambda x: torch.nn.functional.softplus(x),
}  # fmt: skip


@assay.case(T=[6], D=[9])
def plain(make, T, D):
    return {"x": make.normal(T, D)}


@pytest.mark.parametrize("op, cause, text, slope", SLOPES, ids=[f"{op}: {text}" for op, _, text, _ in SLOPES])
def test_a_mistake_in_a_fused_derivative(op, cause, text, slope):
    def backward(x, y, grad_y):
        return {"x": slope(grad_y, y, x)}

    examination = session_of(assay.Target(FORWARD[op], FORWARD[op], cases=plain, backward=backward))
    changes = explain(examination, "x.grad", examination.first.grads["x.grad"], examination.first)
    assert any(w.exact and w.whole and w.cause == cause and text in w.text for w in changes), changes


OWNERS = (0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3)


@assay.case(T=[len(OWNERS)])
def grouped(make, T):
    return {"x": make.normal(T, 5), "owner": torch.tensor(OWNERS)}


def group_sums(x, owner):
    return x.new_zeros(4, 5).index_add(0, owner, x)


BORDERS = {
    "begins one too early": lambda lo, hi: (max(lo - 1, 0), hi),
    "ends one too late": lambda lo, hi: (lo, min(hi + 1, len(OWNERS))),
    "begins one too late": lambda lo, hi: (lo + 1, hi),
    "ends one too early": lambda lo, hi: (lo, hi - 1),
}


@pytest.mark.parametrize("text", BORDERS)
def test_a_border_of_a_group_that_is_off_by_one(text):
    ends = (0, 3, 5, 9, 11)

    def kernel(x, owner):
        spans = [BORDERS[text](lo, hi) for lo, hi in zip(ends, ends[1:], strict=False)]
        return torch.stack([x[lo:hi].sum(0) for lo, hi in spans])

    examination = session_of(assay.Target(kernel, group_sums, cases=grouped, backward=None))
    best = explain(examination, "y", examination.first.outputs["y"], examination.first)[0]
    assert (best.cause, best.exact, best.whole) == ("off_by_one", True, True) and text in best.text, best


@assay.case(N=[7])
def rows(make, N):
    return {"table": make.normal(N, 6), "at": torch.tensor([4, 0, 6, 2, 5, 1, 3, 3])}


@assay.case(N=[9])
def offsets(make, N):
    return {"table": make.normal(N, 6), "at": torch.tensor([0, 2, 5, 8])}


READ = [
    (rows, "shifted", "at is +1, wrapping around", lambda at: (at + 1) % 7),
    (rows, "shifted", "at is -1, within its range", lambda at: (at - 1).clamp(0, 6)),
    (rows, "shifted", "at is shifted by +1 along axis 0", lambda at: at.roll(1)),
    (rows, "wrong_stride", "at is halved", lambda at: at // 2),
    (offsets, "off_by_one", "at is +1, within its range", lambda at: (at + 1).clamp(0, 8)),
]


@pytest.mark.parametrize("case, cause, text, read", READ, ids=[f"{c[0].name}: {t}"
                                                               for c, _, t, _ in READ])  # fmt: skip
def test_an_integer_input_read_wrongly(case, cause, text, read):
    target = assay.Target(lambda table, at: table[read(at)], lambda table, at: table[at], cases=case, backward=None)
    examination = session_of(target)
    changes = explain(examination, "y", examination.first.outputs["y"], examination.first)
    assert any(w.exact and w.cause == cause and w.text == text for w in changes), changes


@assay.case(M=[3], K=[11], N=[4])
def tall(make, M, K, N):
    return {"a": make.normal(M, K), "b": make.normal(K, N)}


def product(a, b):
    return a @ b


def test_exchanged_strides():
    def kernel(a, b):
        return a @ torch.as_strided(b, b.shape, b.stride()[::-1])

    examination = session_of(assay.Target(kernel, product, cases=tall, backward=None))
    changes = explain(examination, "y", examination.first.outputs["y"], examination.first)
    assert changes[0].cause == "wrong_stride" and "in each other's place" in changes[0].text, changes
