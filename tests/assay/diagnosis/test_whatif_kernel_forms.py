"""Changed goldens for kernels in other forms: hand-written backwards, recomputed softmax, loops, blocks, ranks."""

import math

import pytest
import torch

from assay.diagnosis.targets import explain, session_of
from goldsmith import assay

pytestmark = pytest.mark.sweep(8)


def explained_by(candidate, golden, cases, tensor="y", backward="auto"):
    examination = session_of(assay.Target(candidate, golden, cases=cases, backward=backward), ("values", "ensemble"))
    got = dict(examination.first.outputs, **examination.first.grads)[tensor]
    changes = explain(examination, tensor, got, examination.first)
    assert changes, f"nothing explains {tensor}"
    assert changes[0].exact and changes[0].whole, changes[0]
    return changes[0]


# norms, whose backward kernels write with other terms than autograd


@assay.case(T=[5], G=[2], D=[7])
def rows(make, T, G, D):
    return {"x": make.normal(T, G * D) + 0.5, "w": make.normal(G * D), "G": G}


def layer_norm(x, w, G):
    c = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(c.square().mean(-1, keepdim=True) + 1e-5)
    return (c * rstd) * w


def of_layer_norm(form):
    def backward(x, w, G, grad_y):
        c = x - x.mean(-1, keepdim=True)
        rstd = torch.rsqrt(c.square().mean(-1, keepdim=True) + 1e-5)
        hat, g = c * rstd, grad_y * w
        dx = form(g, grad_y, hat, lambda t: t.mean(-1, keepdim=True), rstd)
        return {"x": dx, "w": (grad_y * hat).sum(0)}

    return backward


@pytest.mark.parametrize(
    "cause, form",
    [
        ("wrong_factor", lambda g, dy, hat, mean, rstd: rstd * (g - mean(g) - hat * mean(dy * hat))),
        ("wrong_factor", lambda g, dy, hat, mean, rstd: rstd * (g - mean(dy) - hat * mean(g * hat))),
        ("wrong_factor", lambda g, dy, hat, mean, rstd: rstd * (g - mean(g) - mean(g * hat))),
        ("wrong_factor", lambda g, dy, hat, mean, rstd: rstd * (g - mean(g)) - rstd * rstd * hat * mean(g * hat)),
        ("missing_term", lambda g, dy, hat, mean, rstd: rstd * (g - mean(g))),
    ],
    ids=["inner_sum_without_w", "mean_without_w", "addend_without_x_hat", "rstd_twice", "no_inner_sum"],
)
def test_a_wrong_addend_of_a_norms_gradient(cause, form):
    right = of_layer_norm(lambda g, dy, hat, mean, rstd: rstd * (g - mean(g) - hat * mean(g * hat)))
    for backward, wrong in ((right, False), (of_layer_norm(form), True)):
        target = assay.Target(layer_norm, layer_norm, cases=rows, backward=backward)
        assert assay.check(target, raises=False, probes="values").ok is not wrong
    assert explained_by(layer_norm, layer_norm, rows, "x.grad", of_layer_norm(form)).cause == cause


# attention whose backward recomputes its probabilities


@assay.case(S=[11], D=[4])
def tokens(make, S, D):
    return {"q": make.normal(S, D), "k": make.normal(S, D), "v": make.normal(S, D)}


def hidden(S):
    return ~torch.ones(S, S, dtype=torch.bool).tril()


def attention(q, k, v, limit=None, fill=-math.inf, block=None):
    s = q @ k.mT / math.sqrt(q.shape[-1])
    s = s if limit is None else limit * torch.tanh(s / limit)
    return torch.softmax(s.masked_fill(hidden(len(q)), fill), -1) @ v


def of_attention(again):
    """A backward that saves the logarithms of the sums to base 2."""

    def backward(q, k, v, y, grad_y):
        c = 1 / math.sqrt(q.shape[-1])
        s = (q @ k.mT * c).masked_fill(hidden(len(q)), -math.inf)
        p = again(s / math.log(2), torch.logsumexp(s, -1, keepdim=True) / math.log(2), s)
        ds = p * (grad_y @ v.mT - (grad_y * y).sum(-1, keepdim=True)) * c
        return {"q": ds @ k, "k": ds.mT @ q, "v": p.mT @ grad_y}

    return backward


@pytest.mark.parametrize(
    "cause, again",
    [
        ("wrong_factor", lambda s2, lse2, s: torch.exp(s2 - lse2)),
        ("wrong_factor", lambda s2, lse2, s: torch.exp2(s - lse2)),
        ("wrong_factor", lambda s2, lse2, s: torch.exp2(s2 - lse2 * math.log(2))),
        ("wrong_factor", lambda s2, lse2, s: torch.exp(s - s.amax(-1, keepdim=True))),
        ("mask_shift", lambda s2, lse2, s: torch.exp2(s2 - lse2).tril(-1)),
        ("truncated_reduction", lambda s2, lse2, s: torch.exp2(s2 - lse2) * of_earlier_blocks(len(s), 4)),
    ],
    ids=["e_for_2", "scores_to_base_e", "sum_to_base_e", "maximum_alone", "diagonal_masked", "diagonal_blocks_skipped"],
)
def test_probabilities_recomputed_wrongly_in_the_backward(cause, again):
    right = assay.Target(attention, attention, cases=tokens, backward=of_attention(lambda a, b, s: torch.exp2(a - b)))
    assert assay.check(right, raises=False, probes="values").ok
    assert explained_by(attention, attention, tokens, "q.grad", of_attention(again)).cause == cause


def of_earlier_blocks(S, block):
    at = torch.arange(S) // block
    return at[:, None] > at


def test_a_clamp_applied_after_the_mask():
    """Also: zeros at masked places."""

    def late_step(q, k, v):
        s = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden(len(q)), -math.inf)
        return torch.softmax(3 * torch.tanh(s / 3), -1) @ v

    golden = lambda q, k, v: attention(q, k, v, 3.0)  # noqa: E731
    change = explained_by(late_step, golden, tokens)
    assert change.cause == "wrong_mask" and abs(change.params["value"] + 3) < 1e-3
    zeros = explained_by(lambda q, k, v: attention(q, k, v, 3.0, 0.0), golden, tokens)
    assert zeros.cause == "wrong_mask"


def test_a_scale_applied_after_the_function():
    def late_step(q, k, v):
        s = 3 * torch.tanh(q @ k.mT / 3) / math.sqrt(q.shape[-1])
        return torch.softmax(s.masked_fill(hidden(len(q)), -math.inf), -1) @ v

    assert explained_by(late_step, lambda q, k, v: attention(q, k, v, 3.0), tokens).cause == "wrong_factor"


# loops


@assay.case(T=[7], N=[3])
def steps(make, T, N):
    return {"x": make.normal(T, N), "a": make.uniform(T, N)}


def scan(x, a):
    h, out = torch.zeros_like(x[0]), []
    for t in range(len(x)):
        h = torch.exp(-a[t]) * h + x[t]
        out.append(h)
    return torch.stack(out)


@pytest.mark.parametrize(
    "cause, decay", [("shifted", lambda a, t: torch.exp(-a[max(t - 1, 0)])), ("wrong_factor", lambda a, t: -a[t])],
)  # fmt: skip
def test_the_same_mistake_in_every_step_of_a_loop(cause, decay):
    def kernel(x, a):
        h, out = torch.zeros_like(x[0]), []
        for t in range(len(x)):
            h = decay(a, t) * h + x[t]
            out.append(h)
        return torch.stack(out)

    assert explained_by(kernel, scan, steps).cause == cause


# heads, adapters, ranks


@assay.case(H=[6], R=[3], D=[5])
def heads(make, H, R, D):
    return {"q": make.normal(H, D), "k": make.normal(H // R, D)}


def each(q, k):
    return q * k.repeat_interleave(len(q) // len(k), 0)


def joined(q, k):
    return q * k[:, None].expand(len(k), len(q) // len(k), -1).reshape(q.shape)


@pytest.mark.parametrize("golden", [each, joined], ids=["indices", "views"])
def test_heads_interleaved_instead_of_grouped_are_explained(golden):
    change = explained_by(lambda q, k: q * k[torch.arange(len(q)) % len(k)], golden, heads)
    assert change.cause == "permuted" and "wrong_stride" in change.also


@assay.case(A=[4], D=[3], T=[12])
def adapters(make, A, D, T):
    return {"x": make.normal(T, D), "w": make.normal(A, D), "which": torch.tensor([2, 0, 3, 1]),
            "off": torch.tensor([0, 4, 5, 9, 12])}  # fmt: skip


def adapted(x, w, which, off):
    return x * w[which.repeat_interleave(off.diff())]


@pytest.mark.parametrize(
    "cause, wrong",
    [
        ("permuted", lambda x, w, which, off: adapted(x, w, which.argsort(), off)),
        ("permuted", lambda x, w, which, off: adapted(x, w, torch.arange(4), off)),
    ],
    ids=["inverse", "ignored"],
)
def test_the_wrong_adapter_for_a_segment(cause, wrong):
    assert explained_by(wrong, adapted, adapters).cause == cause


@assay.case(V=[5], D=[3], T=[14])
def words(make, V, D, T):
    return {"table": make.normal(V, D), "word": make.integers(0, V, T)}


@pytest.mark.parametrize(
    "golden", [lambda table, word: table[word], torch.nn.functional.embedding], ids=["index", "embedding"]
)
def test_only_one_gradient_of_a_row_survives(golden):
    """No order in the golden determines which one."""

    def read(table, word):
        return golden(table, word) if golden.__name__ == "<lambda>" else golden(word, table)

    def backward(table, word, grad_y):
        last = torch.zeros_like(table)
        for i in torch.randperm(len(word), generator=torch.Generator().manual_seed(1)).tolist():
            last[word[i]] = grad_y[i]
        return {"table": last}

    assert explained_by(read, read, words, "table.grad", backward).cause == "lost_update"


def average(x, a):
    h, out = torch.zeros_like(x[0]), []
    for t in range(len(x)):
        h = a[t] * h + (1 - a[t]) * x[t]
        out.append(h)
    return torch.stack(out)


@pytest.mark.parametrize("cause, tensor", [("wrong_factor", "x.grad")])
def test_the_same_mistake_in_every_step_of_a_backward(cause, tensor):
    """The last turn's gradient has another source than the others'."""

    def backward(x, a, y, grad_y):
        dx, da, dh = torch.empty_like(x), torch.empty_like(a), torch.zeros_like(x[0])
        for t in reversed(range(len(x))):
            dh = dh + grad_y[t]
            before = y[t - 1] if t else torch.zeros_like(dh)
            dx[t], da[t] = (1 - a[t]) * dh, dh * (before if tensor == "a.grad" else before - x[t])
            dh = dh if tensor == "x.grad" else dh * a[t]
        return {"x": dx, "a": da}

    assert explained_by(average, average, steps, tensor, backward).cause == cause
