"""Changed goldens whose result is a single number, such as a loss, and softmax in blocks."""

import math

import pytest
import torch

from assay.diagnosis.targets import explain, session_of
from goldsmith import assay

pytestmark = pytest.mark.sweep(8)


@assay.case(T=[13], V=[40])
def tokens(make, T, V):
    target = make.integers(0, V, T)
    target[::4] = -1
    return {"logits": make.normal(T, V, std=2.0), "target": target, "z": 0.01}


def loss(logits, target, z, *, power=2, times=1, logsumexp=torch.logsumexp):
    """Cross entropy of the tokens that have a target, plus z times the squared logsumexp of each."""
    lse, valid = logsumexp(logits, -1), target >= 0
    nll = lse - logits.gather(1, target.clamp(min=0)[:, None])[:, 0]
    each = torch.where(valid, nll + times * z * lse**power, 0.0)
    return each.sum() / valid.sum()


class OwnGradient(torch.autograd.Function):
    """The loss, with a backward that uses `sent(dy)` as its output's gradient."""

    @staticmethod
    def forward(ctx, logits, target, z, sent):
        ctx.save_for_backward(logits, target)
        ctx.z, ctx.sent = z, sent
        return loss(logits, target, z)

    @staticmethod
    def backward(ctx, dy):
        logits, target = ctx.saved_tensors
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss(leaf, target, ctx.z).backward(ctx.sent(dy))
        return leaf.grad, None, None, None


def explained(candidate, tensor="y", golden=loss, cases=tokens):
    examination = session_of(assay.Target(candidate, golden, cases=cases), ("values", "ensemble"))
    got = dict(examination.first.outputs, **examination.first.grads)[tensor]
    return explain(examination, tensor, got, examination.first)


def test_a_scalar_is_explained_only_by_changes_that_hold_on_other_inputs():
    change = explained(lambda logits, target, z: loss(logits, target, z, power=1))
    assert [w.cause for w in change[:1]] == ["wrong_factor"]
    assert "lse" in change[0].text or "logsumexp" in change[0].text
    assert not any("multiplied by" in w.text for w in change), "a factor that fits one draw alone"


def test_a_factor_shared_by_all_draws_is_named():
    change = explained(lambda logits, target, z: loss(logits, target, z, times=2.7))
    assert change and {w.cause for w in change} == {"wrong_factor"}
    assert any("2.7" in w.text for w in change)


def test_an_unexplained_scalar_has_no_explanation():
    def odd(logits, target, z):
        return loss(logits, target, z) + (logits * torch.arange(logits.shape[1])).sin().mean()

    assert explained(odd) == []


@pytest.mark.parametrize("sent, text", [(torch.ones_like, "grad_y counts as one"), (torch.square, "grad_y is squared")])
def test_a_backward_that_changes_its_output_gradient(sent, text):
    change = explained(lambda logits, target, z: OwnGradient.apply(logits, target, z, sent), "logits.grad")
    assert (change[0].cause, change[0].text, change[0].exact) == ("wrong_factor", text, True)


# softmax in blocks

BLOCK = 16


def in_blocks(x, dim):
    """logsumexp whose running sum is not rescaled when the maximum moves."""
    high, total = torch.full_like(x[:, 0], -torch.inf), torch.zeros_like(x[:, 0])
    for block in x.split(BLOCK, dim):
        high = torch.maximum(high, block.amax(dim))
        total = total + torch.exp(block - high[:, None]).sum(dim)
    return high + total.log()


def by_hand(x, dim):
    high = x.amax(dim, keepdim=True)
    return (high + torch.exp(x - high).sum(dim, keepdim=True).log())[:, 0]


@assay.case(T=[9], D=[40])
def rows(make, T, D):
    return {"x": make.normal(T, D, std=2.0), "v": make.normal(D, 3)}


def attend(x, v):
    high = x.amax(-1, keepdim=True)
    e = torch.exp(x - high)
    return e @ v / e.sum(-1, keepdim=True)


def attend_in_blocks(x, v):
    """The sum is rescaled, the accumulator is not."""
    high, total, acc = (
        torch.full_like(x[:, :1], -torch.inf),
        torch.zeros_like(x[:, :1]),
        torch.zeros(len(x), v.shape[1]),
    )
    for b, u in zip(x.split(BLOCK, -1), v.split(BLOCK), strict=True):
        now = torch.maximum(high, b.amax(-1, keepdim=True))
        e = torch.exp(b - now)
        total, acc, high = total * torch.exp(high - now) + e.sum(-1, keepdim=True), acc + e @ u, now
    return acc / total


@pytest.mark.parametrize(
    "candidate, golden, cases, which",
    [
        (lambda logits, target, z: loss(logits, target, z, logsumexp=in_blocks), loss, tokens, "sum"),
        (lambda x: in_blocks(x, -1), lambda x: by_hand(x, -1), {"x": torch.randn(9, 40).mul(2)}, "sum"),
        (lambda x: x - in_blocks(x, -1)[:, None], lambda x: x.log_softmax(-1), {"x": torch.randn(9, 40).mul(2)}, "sum"),
        (attend_in_blocks, attend, rows, "accumulator"),
    ],
    ids=["loss", "by_hand", "log_softmax", "attention"],
)
def test_an_online_softmax_without_rescaling(candidate, golden, cases, which):
    change = explained(candidate, golden=golden, cases=cases)
    assert (change[0].cause, change[0].exact) == ("missing_rescale", True)
    assert change[0].params == {"block": BLOCK, "which": which}


@assay.case(T=[5], V=[8], s=[0.5])
def scaled(make, T, V, s):
    return {"z": make.normal(T, V), "b": make.normal(T, T), "y": make.integers(0, V, T), "s": s}


def picked(z, b, y, s):
    return -torch.log_softmax(z * s, -1).gather(1, y[:, None])[:, 0]


def biased(z, b, y, s):
    return torch.softmax(z @ z.mT * s + b, -1) @ z


@pytest.mark.parametrize(
    "golden, candidate, text",
    [
        (
            picked,
            lambda z, b, y, s: torch.logsumexp(z * s, -1) - z.gather(1, y[:, None])[:, 0],
            "the argument of log_softmax(z * 0.5) is multiplied, outside of its sum, by 2",
        ),
        (
            biased,
            lambda z, b, y, s: biased(z, b * math.log(2), y, s),
            "b is multiplied, in ((z @ z) * 0.5) + b, by 0.693147 = ln 2",
        ),
    ],
)
def test_a_factor_of_one_use_of_a_softmaxs_argument_or_of_one_addend_is_found(golden, candidate, text):
    (first, *_) = explained(candidate, golden=golden, cases=scaled)
    assert (first.cause, first.text) == ("wrong_factor", text)
