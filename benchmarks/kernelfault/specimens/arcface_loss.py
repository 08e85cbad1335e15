"""mean over labelled rows of the cross entropy of s cos(angle to each class), the own class' angle wider by `margin`.

Additive angular margin (ArcFace) as face recognition trains it: rows and class centres are normalised, the own class'
cosine becomes cos(angle + margin), or cosine - margin sin(margin) where the angle would pass pi. Label -1: a row whose
class is elsewhere; it has no loss. Classes in chunks with a running logsumexp; the backward forms cosines again.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

CHUNK = 8


@assay.case(T=[9], C=[21], D=[6])
def faces(make, T, C, D):
    label = make.integers(0, C, T)
    label[make.permutation(T)[:2]] = -1
    x, centre = make.normal(T, D), make.normal(C, D)
    row = int(make.permutation(T)[0])
    if label[row] >= 0:  # one row far from its class
        x[row] = 0.1 * x[row] - 2 * centre[label[row]]
    return {"x": x, "centre": centre, "label": label, "s": 4.0, "margin": 0.5}


@assay.case(T=[6], C=[13], D=[10])
def wide(make, T, C, D):
    return {**faces[0].draw(make, T, C, D), "s": 8.0, "margin": 0.3}


def golden(x, centre, label, s, margin):
    norm_x, norm_c = x.norm(dim=1, keepdim=True), centre.norm(dim=1, keepdim=True)
    cosine = (x / norm_x) @ (centre / norm_c).mT
    own = cosine.gather(1, label.clamp(min=0).unsqueeze(1))
    sine = torch.sqrt(1 - own.square())
    wider = own * math.cos(margin) - sine * math.sin(margin)
    own = assay.stage("phi", torch.where(own > -math.cos(margin), wider, own - margin * math.sin(margin)))
    logits = s * cosine.scatter(1, label.clamp(min=0).unsqueeze(1), own)
    losses = torch.logsumexp(logits, 1) - s * own.squeeze(1)
    return losses[label >= 0].mean()


def widened(own, margin):
    """The own class' cosine with its margin, and the derivative by the cosine."""
    sine = torch.sqrt(1 - own * own)
    wider = own * math.cos(margin) - sine * math.sin(margin)
    slope = math.cos(margin) + own / sine * math.sin(margin)
    inside = own > -math.cos(margin)
    easy = own - margin * math.sin(margin)
    return torch.where(inside, wider, easy), torch.where(inside, slope, 1.0)


class ArcFace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, centre, label, s, margin):
        C = len(centre)
        inv_x, inv_c = 1 / x.norm(dim=1, keepdim=True), 1 / centre.norm(dim=1, keepdim=True)
        unit_x, unit_c = x * inv_x, centre * inv_c
        kept = label >= 0
        own = (unit_x * unit_c[label.clamp(min=0)]).sum(1)
        phi, slope = widened(own, margin)
        phi = assay.stage("phi", phi)
        top, total = torch.full_like(own, -math.inf), torch.zeros_like(own)
        for at in range(0, C, CHUNK):
            logits = s * (unit_x @ unit_c[at : at + CHUNK].mT)
            column = torch.arange(at, min(at + CHUNK, C))
            logits = torch.where(column == label.unsqueeze(1), s * phi.unsqueeze(1), logits)
            higher = torch.maximum(top, logits.amax(1))
            total = total * torch.exp(top - higher) + torch.exp(logits - higher.unsqueeze(1)).sum(1)
            top = higher
        lse = top + torch.log(total)
        count = kept.sum()
        ctx.save_for_backward(unit_x, unit_c, inv_x, inv_c, label, phi, slope, lse, count)
        ctx.s = s
        return torch.where(kept, lse - s * phi, 0.0).sum() / count

    @staticmethod
    def backward(ctx, g):
        unit_x, unit_c, inv_x, inv_c, label, phi, slope, lse, count = ctx.saved_tensors
        C, s = len(unit_c), ctx.s
        weight = torch.where(label >= 0, g / count, 0.0).unsqueeze(1)
        dunit_x, dunit_c = torch.zeros_like(unit_x), torch.empty_like(unit_c)
        for at in range(0, C, CHUNK):
            centres = unit_c[at : at + CHUNK]
            column = torch.arange(at, min(at + CHUNK, C))
            mine = column == label.unsqueeze(1)
            logits = torch.where(mine, s * phi.unsqueeze(1), s * (unit_x @ centres.mT))
            dlogits = torch.exp(logits - lse.unsqueeze(1)) - mine.float()
            dcosine = s * weight * dlogits * torch.where(mine, slope.unsqueeze(1), 1.0)
            dunit_x += dcosine @ centres
            dunit_c[at : at + CHUNK] = dcosine.mT @ unit_x
        dx = inv_x * (dunit_x - unit_x * (dunit_x * unit_x).sum(1, keepdim=True))
        dcentre = inv_c * (dunit_c - unit_c * (dunit_c * unit_c).sum(1, keepdim=True))
        return dx, dcentre, None, None, None


def kernel(x, centre, label, s, margin):
    return ArcFace.apply(x, centre, label, s, margin)


def target():
    return assay.Target(kernel, golden, cases=[faces, wide], name="arcface_loss", outputs=("loss",))
