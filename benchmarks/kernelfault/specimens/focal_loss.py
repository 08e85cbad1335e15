"""sum alpha_t (1 - p_t)^gamma (-log p_t) / max(1, positives) over anchors and classes: the sigmoid focal loss.

A label is a class, -1 for background or -2 for an anchor that has no say. Programs go over tiles of anchors, and each
leaves its sum in a workspace. With s = x for the label's class and -x for others, 1 - p_t is sigmoid(-s).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from goldsmith import assay

TILE = 4


@assay.case(N=[11], C=[5])
def anchors(make, N, C):
    label = make.integers(-1, C, N)
    label[:4] = torch.tensor([0, -2, C - 1, -1])
    return {"logits": make.normal(N, C), "label": label, "alpha": 0.25, "gamma": 2.0}


@assay.case(N=[6], C=[9])
def soft(make, N, C):
    return {**anchors[0].draw(make, N, C), "alpha": 0.6, "gamma": 1.5}


def golden(logits, label, alpha, gamma):
    hit = label.unsqueeze(1) == torch.arange(logits.shape[1])
    s = torch.where(hit, logits, -logits)
    weight = torch.where(hit, alpha, 1 - alpha)
    each = assay.stage("each", weight * torch.sigmoid(-s) ** gamma * F.softplus(-s))
    seen = (label != -2).unsqueeze(1)
    return torch.where(seen, each, 0.0).sum() / (label >= 0).sum().clamp(min=1)


def tiles(N):
    return [slice(at, min(at + TILE, N)) for at in range(0, N, TILE)]


def signed(logits, label):
    """s, and where the class is the label's."""
    hit = label.unsqueeze(1) == torch.arange(logits.shape[1])
    return torch.where(hit, logits, -logits), hit


class Focal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, label, alpha, gamma):
        N, C = logits.shape
        each, part = torch.empty(N, C), torch.empty(len(tiles(N)))
        for now in tiles(N):
            s, hit = signed(logits[now], label[now])
            weight = torch.where(hit, alpha, 1 - alpha)
            bce = torch.relu(-s) + torch.log1p(torch.exp(-s.abs()))
            each[now] = weight * torch.sigmoid(-s) ** gamma * bce
        each = assay.stage("each", each)
        for i, now in enumerate(tiles(N)):
            seen = (label[now] != -2).unsqueeze(1)
            part[i] = torch.where(seen, each[now], 0.0).sum()
        positives = (label >= 0).sum().clamp(min=1)
        ctx.save_for_backward(logits, label, positives)
        ctx.alpha, ctx.gamma = alpha, gamma
        return part.sum() / positives

    @staticmethod
    def backward(ctx, g):
        logits, label, positives = ctx.saved_tensors
        alpha, gamma = ctx.alpha, ctx.gamma
        grad = torch.empty(logits.shape)
        rate = g / positives
        for now in tiles(len(logits)):
            s, hit = signed(logits[now], label[now])
            m = torch.sigmoid(-s)
            bce = torch.relu(-s) + torch.log1p(torch.exp(-s.abs()))
            weight = torch.where(hit, -alpha, 1 - alpha)
            slope = m**gamma * (m + gamma * torch.sigmoid(s) * bce)
            grad[now] = torch.where((label[now] != -2).unsqueeze(1), rate * weight * slope, 0.0)
        return grad, None, None, None


def kernel(logits, label, alpha, gamma):
    return Focal.apply(logits, label, alpha, gamma)


def target():
    return assay.Target(
        kernel, golden, cases=[anchors, soft], name="focal_loss", outputs=("loss",), grads=("logits",)
    )  # fmt: skip
