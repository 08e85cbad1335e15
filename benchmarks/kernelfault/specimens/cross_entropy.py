"""loss[t] = logsumexp(logits[t]) - logits[t, target[t]], 0 where target is -1; the gradient by hand."""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(T=[12], V=[50])
def tokens(make, T, V):
    target = make.integers(0, V, T)
    target[1::3] = -1
    return {"logits": make.normal(T, V, std=2.0), "target": target}


@assay.case(T=[5], V=[129])
def odd(make, T, V):
    return tokens[0].draw(make, T, V)


@assay.case(T=[31], V=[17])
def narrow(make, T, V):
    return tokens[0].draw(make, T, V)


def golden(logits, target):
    valid = target >= 0
    lse = assay.stage("lse", torch.logsumexp(logits, -1))
    picked = assay.stage("picked", logits.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1))
    return torch.where(valid, lse - picked, torch.zeros_like(lse)), lse


def forward(logits, target):
    top = torch.full((len(logits),), float("-inf"))
    total = torch.zeros(len(logits))
    for start in range(0, logits.shape[1], 16):
        block = logits[:, start : start + 16]
        new = torch.maximum(top, block.amax(-1))
        total = total * torch.exp(top - new) + torch.exp(block - new.unsqueeze(1)).sum(-1)
        top = new
    lse = assay.stage("lse", torch.log(total) + top)
    at = torch.where(target >= 0, target, 0)
    picked = assay.stage("picked", logits[torch.arange(len(target)), at])
    return torch.where(target >= 0, lse - picked, 0.0), lse.clone()


def backward(logits, target, lse, grad_loss):
    p = torch.exp(logits - lse.unsqueeze(1))
    hot = torch.zeros_like(logits)
    valid = target >= 0
    hot[valid, target[valid]] = 1.0
    return {"logits": (p - hot) * (grad_loss * valid).unsqueeze(1)}


def target():
    return assay.Target(
        forward, golden, cases=[tokens, odd, narrow], name="cross_entropy", outputs=("loss", "lse"), saved=("lse",),
        backward=backward,
    )  # fmt: skip
