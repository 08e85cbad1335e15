"""Illegal choices are explained by the change that makes them; results that share a buffer or exchange their parts."""

import pytest
import torch

from goldsmith import assay

pytestmark = pytest.mark.sweep(8)

K, TILE = 2, 4


@assay.case(B=[6], H=[3], V=[10])
def scored(make, B, H, V):
    return {"logits": make.normal(B, H, V), "bonus": make.normal(B, H), "done": make.uniform(B, H) < 0.4, "temp": 0.5}


def golden(logits, bonus, done, temp):
    lse = assay.stage("lse", torch.logsumexp(logits, 2))
    open_ = torch.where(done.unsqueeze(2), -torch.inf, logits - lse.unsqueeze(2))
    rank = assay.stage("rank", (open_ / (temp + bonus.unsqueeze(2).square())).flatten(1))
    index = assay.stage("index", rank.topk(K, 1).indices)
    return rank.gather(1, index), index


def kernel(*, shift=True, none=-torch.inf, weigh=True, places=lambda i, V: i, first=0, last=0, each=False):
    """The same with a mistake."""

    def run(logits, bonus, done, temp):
        V = logits.shape[2]
        top = logits.amax(2, keepdim=True) if shift else torch.zeros_like(logits[..., :1])
        lse = assay.stage("lse", (top + torch.exp(logits - top).sum(2, keepdim=True).log())[..., 0])
        open_ = torch.where(done.unsqueeze(2), none, logits - lse.unsqueeze(2))
        rank = open_ / (temp + bonus.unsqueeze(2).square()) if weigh else open_
        if last:
            rank[:, :, V - last :] = -torch.inf
        rank[:, :, :first] = -torch.inf
        if each:
            for v in range(0, V, TILE):
                rank[:, :, v : v + TILE].topk(TILE - 1, 2)
        best, index = rank.flatten(1).topk(K, 1)
        return best, assay.stage("index", places(index, V))

    return run


def diagnosed(**mistake):
    decisions = {"index": assay.topk(scores="rank", k=K)}
    return assay.diagnose(
        assay.Target(
            kernel(**mistake), golden, cases=scored, outputs=("best", "index"), backward=None, decisions=decisions
        )
    )


def test_the_right_choice_is_accepted():
    assert diagnosed().report.ok


def test_a_choice_that_fails_only_with_large_inputs_follows_from_a_failing_stage():
    result = diagnosed(shift=False)
    assert result.causes[0].id in ("missing_max_shift", "overflow"), str(result)
    assert result.causes[0].tensor == "lse"


def test_requesting_more_than_the_last_tile_holds_is_no_wrong_index():
    result = diagnosed(each=True)
    assert [c.id for c in result.causes][0] == "bad_config" and "invalid_index" not in {c.id for c in result.causes}


@assay.case(R=[7], C=[4])
def packed(make, R, C):
    return {"x": make.normal(R, C), "w": make.normal(R, C), "mod": make.normal(R, 3 * C)}


def modulated(x, w, mod):
    shift, scale, gate = mod.chunk(3, 1)
    return (torch.tanh(x) * (1 + scale) + shift) * gate + torch.sigmoid(w)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, mod, fault):
        ctx.save_for_backward(x, w, mod)
        ctx.fault = fault
        return modulated(x, w, mod)

    @staticmethod
    def backward(ctx, g):
        x, w, mod = ctx.saved_tensors
        shift, scale, gate = mod.chunk(3, 1)
        t, s = torch.tanh(x), torch.sigmoid(w)
        dx, dw = g * gate * (1 + scale) * (1 - t * t), g * s * (1 - s)
        parts = [g * gate, g * gate * t, g * (t * (1 + scale) + shift)]
        if ctx.fault == "buffer":
            dx = dw = dx + dw
        if ctx.fault == "parts":
            parts = [parts[1], parts[0], parts[2]]
        return dx, dw.clone(), torch.cat(parts, 1), None


@pytest.mark.parametrize("fault, cause, text", [("buffer", "aliased", "the sum of what each of them should hold"),
                                                ("parts", "swapped_results", "hold each other's numbers")])  # fmt: skip
def test_results_accumulated_in_one_buffer_or_packed_in_the_wrong_order(fault, cause, text):
    diagnosis = assay.diagnose(
        assay.Target(lambda x, w, mod: Backward.apply(x, w, mod, fault), modulated, cases=packed)
    )
    assert diagnosis.causes[0].id == cause and any(text in message for message in diagnosis.causes[0].evidence), str(
        diagnosis
    )
