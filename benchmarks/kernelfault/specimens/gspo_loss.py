"""loss = mean_i (-min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i) + beta mean_t k_it),  s_i = exp(mean_t (new - old)).

Policy optimisation with importance ratios of whole sequences: s is the geometric mean of the tokens' ratios, clipped
on two sides, and k = exp(ref - new) - (ref - new) - 1 holds the policy to a reference. Log-probabilities are padded to
[S, T]; a sequence has `lengths` tokens after its `prompt` tokens, and one without any does not count. Plain torch by
tiles of sequences, with the gradient by hand.
"""

from __future__ import annotations

import torch

from goldsmith import assay

TILE = 3


@assay.case(S=[7], T=[8])
def responses(make, S, T):
    new = -1 - make.uniform(S, T)
    prompt = make.integers(0, 3, S)
    lengths = torch.minimum(make.integers(1, T, S), T - prompt)
    lengths[S // 2] = 0
    return {
        "new": new, "old": new + make.normal(S, T, std=0.4), "ref": new + make.normal(S, T, std=0.5),
        "advantage": make.normal(S), "prompt": prompt, "lengths": lengths, "low": 0.1, "high": 0.15, "beta": 0.2,
    }  # fmt: skip


@assay.case(S=[4], T=[5])
def tokens_first(make, S, T):
    drawn = responses[0].draw(make, S, T)
    return {**drawn, "new": (-2 + make.uniform(T, S)).T, "old": (-2 + make.uniform(T, S)).T, "beta": 0.05}


def golden(new, old, ref, advantage, prompt, lengths, low, high, beta):
    place = torch.arange(new.shape[1], device=new.device) - prompt.unsqueeze(1)
    kept = (place >= 0) & (place < lengths.unsqueeze(1))
    length = lengths.clamp(min=1).to(new.dtype)
    zero = torch.zeros_like(new)
    s = assay.stage("s", torch.exp(torch.where(kept, new - old, zero).sum(1) / length))
    gain = torch.minimum(s * advantage, s.clamp(1 - low, 1 + high) * advantage)
    gap = torch.where(kept, ref - new, zero)
    hold = assay.stage("hold", (torch.exp(gap) - gap - 1).sum(1) / length)
    there = lengths > 0
    each = torch.where(there, beta * hold - gain, torch.zeros_like(gain))
    return each.sum() / there.sum().clamp(min=1).to(new.dtype)


def of_response(prompt, lengths, T):
    """Which tokens count, [S, T]."""
    t = torch.arange(T, device=prompt.device)
    return (t >= prompt.unsqueeze(1)) & (t < (prompt + lengths).unsqueeze(1))


def clipped(s, low, high):
    return torch.clamp(s, 1 - low, 1 + high)


class GSPOLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, new, old, ref, advantage, prompt, lengths, low, high, beta):
        S, T = new.shape
        s, hold = new.new_empty(S), new.new_empty(S)
        for at in range(0, S, TILE):
            now = slice(at, min(at + TILE, S))
            kept = of_response(prompt[now], lengths[now], T)
            length = lengths[now].clamp(min=1)
            s[now] = torch.exp((new[now] - old[now]).masked_fill(~kept, 0).sum(1) / length)
            gap = (ref[now] - new[now]).masked_fill(~kept, 0)
            hold[now] = (torch.expm1(gap) - gap).sum(1) / length
        s, hold = assay.stage("s", s), assay.stage("hold", hold)
        there = lengths > 0
        count = there.sum().clamp(min=1)
        gain = torch.minimum(s * advantage, clipped(s, low, high) * advantage)
        ctx.save_for_backward(new, ref, advantage, prompt, lengths, s, count)
        ctx.settings = low, high, beta
        return (beta * hold - gain).masked_fill(~there, 0).sum() / count

    @staticmethod
    def backward(ctx, g):
        new, ref, advantage, prompt, lengths, s, count = ctx.saved_tensors
        low, high, beta = ctx.settings
        S, T = new.shape
        dnew = torch.zeros_like(new)
        active = s * advantage <= clipped(s, low, high) * advantage
        weight = g / (count * lengths.clamp(min=1))
        for at in range(0, S, TILE):
            now = slice(at, min(at + TILE, S))
            kept = of_response(prompt[now], lengths[now], T)
            pull = torch.where(active[now], -s[now] * advantage[now], 0.0)
            away = -torch.expm1(ref[now] - new[now])
            dnew[now] = torch.where(kept, weight[now, None] * (pull[:, None] + beta * away), 0.0)
        return dnew, *[None] * 8


def kernel(new, old, ref, advantage, prompt, lengths, low, high, beta):
    return GSPOLoss.apply(new, old, ref, advantage, prompt, lengths, low, high, beta)


def target():
    cases = [responses, tokens_first]
    return assay.Target(kernel, golden, cases=cases, name="gspo_loss", outputs=("loss",), grads=("new",))
