"""loss = - weight sum_i m[i] log softmax(logits[action])[i], m the target's distribution after a step: C51.

The next action has the best expected return of the target network, its atoms are moved to reward + gamma z (reward
alone where the episode ended), cut to the range, and their shares are dealt to the two atoms beside them, by index.
The target is held for a constant; the gradient has a row of its own for each action, zeros for those not taken.
"""

from __future__ import annotations

import torch

from goldsmith import assay

TILE = 4


@assay.case(B=[6], A=[3], Z=[7])
def steps(make, B, A, Z):
    done = (make.uniform(B) < 0.4).to(torch.int32)
    done[0], done[1] = 1, 0
    reward = make.normal(B)
    reward[0] = 30.0
    return {
        "logits": make.normal(B, A, Z), "next_logits": make.normal(B, A, Z), "action": make.integers(0, A, B),
        "reward": reward, "done": done, "weight": 0.5 + make.uniform(B), "gamma": 0.9, "low": -4.0, "high": 4.0,
    }  # fmt: skip


@assay.case(B=[3], A=[5], Z=[5])
def actions(make, B, A, Z):
    return {**steps[0].draw(make, B, A, Z), "low": -2.0, "high": 3.0}


@assay.case(B=[5], A=[2], Z=[11])
def atoms(make, B, A, Z):
    return {**steps[0].draw(make, B, A, Z), "gamma": 0.6, "low": -10.0, "high": 10.0}


def golden(logits, next_logits, action, reward, done, weight, gamma, low, high):
    B, _, Z = logits.shape
    z, apart = torch.linspace(low, high, Z, dtype=logits.dtype), (high - low) / (Z - 1)
    p = torch.softmax(next_logits, 2)
    q = assay.stage("q", (p * z).sum(2))
    best = assay.stage("best", q.argmax(1))
    moved = (reward.unsqueeze(1) + gamma * (1 - done.to(z.dtype)).unsqueeze(1) * z).clamp(low, high)
    near = torch.relu(1 - (moved.unsqueeze(2) - z).abs() / apart)
    m = assay.stage("m", (p[torch.arange(B), best].unsqueeze(2) * near).sum(1))
    logp = torch.log_softmax(logits[torch.arange(B), action], 1)
    return -weight * (m.detach() * logp).sum(1), best


class C51(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, next_logits, action, reward, done, weight, gamma, low, high):
        B, A, Z = logits.shape
        z, apart = torch.linspace(low, high, Z), (high - low) / (Z - 1)
        p = torch.softmax(next_logits, 2)
        q = assay.stage("q", (p * z).sum(2))
        best = assay.stage("best", q.argmax(1))
        m = torch.zeros(B * Z)
        for b in range(0, B, TILE):
            rows = torch.arange(b, min(b + TILE, B))
            goes_on = 1 - done[rows].float()
            moved = (reward[rows].unsqueeze(1) + gamma * goes_on.unsqueeze(1) * z).clamp(low, high)
            place = (moved - low) / apart
            left = place.floor()
            right, part = left + 1, place - left
            share = p[rows, best[rows]]
            first = rows.unsqueeze(1) * Z
            m.index_add_(0, (first + left.long().clamp(0, Z - 1)).flatten(), (share * (1 - part)).flatten())
            m.index_add_(0, (first + right.long().clamp(0, Z - 1)).flatten(), (share * part).flatten())
        m = assay.stage("m", m.view(B, Z))
        logp = torch.log_softmax(logits[torch.arange(B), action], 1)
        ctx.save_for_backward(logp, m, action, weight)
        ctx.actions = A
        ctx.mark_non_differentiable(best)
        return -weight * (m * logp).sum(1), best

    @staticmethod
    def backward(ctx, g, _):
        logp, m, action, weight = ctx.saved_tensors
        (B, Z), rows = logp.shape, torch.arange(len(logp))
        dlogits = torch.empty(B, ctx.actions, Z)
        dlogits.zero_()
        dtaken = torch.exp(logp) * m.sum(1, keepdim=True) - m
        dlogits[rows, action] = (g * weight).unsqueeze(1) * dtaken
        return dlogits, *[None] * 8


def kernel(logits, next_logits, action, reward, done, weight, gamma, low, high):
    return C51.apply(logits, next_logits, action, reward, done, weight, gamma, low, high)


def target():
    return assay.Target(
        kernel, golden, cases=[steps, actions, atoms], name="c51_loss", outputs=("loss", "best"), grads=("logits",),
        decisions={"best": assay.argmax(scores="q")},
    )  # fmt: skip
