"""out[t] = sum_m combine[t, m] y[m],  y[m] = silu(slots[m] w[expert of m]),  slots[m] = sum_t dispatch[t, m] x[t].

A soft mixture of experts: with logits = gain norm(x) . norm(phi), dispatch is their softmax over the tokens of a
sequence, padding left out, and combine is their softmax over all slots of all experts. Plain torch, with a backward by
hand that goes expert by expert.
"""

from __future__ import annotations

import torch

from goldsmith import assay

EPS = 1e-4


@assay.case(B=[2], T=[9], D=[6], E=[3], S=[2])
def padded(make, B, T, D, E, S):
    valid = torch.arange(T, device=make.device) < torch.tensor([[T], [T - 4]] * B, device=make.device)[:B]
    return {
        "x": make.normal(B, T, D), "valid": valid, "phi": make.normal(D, E, S), "gain": 2 * make.ones(1),
        "w": make.normal(E, D, D, std=0.5),
    }  # fmt: skip


@assay.case(B=[3], T=[5], D=[8], E=[2], S=[4])
def full(make, B, T, D, E, S):
    drawn = padded[0].draw(make, B, T, D, E, S)
    return {**drawn, "valid": torch.ones(B, T, dtype=torch.bool, device=make.device), "gain": make.ones(1)}


def golden(x, valid, phi, gain, w):
    E, S = phi.shape[1:]
    x_hat = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
    phi_hat = (phi * torch.rsqrt(phi.square().sum(0) + EPS)).flatten(1)
    logits = gain * (x_hat @ phi_hat)
    dispatch = assay.stage("dispatch", torch.softmax(logits.masked_fill(~valid.unsqueeze(-1), -torch.inf), 1))
    combine = assay.stage("combine", torch.softmax(logits, -1))
    slots = assay.stage("slots", dispatch.mT @ x)
    y = torch.nn.functional.silu(torch.einsum("besd,edf->besf", slots.unflatten(1, (E, S)), w)).flatten(1, 2)
    return combine @ y


class SoftMoE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, valid, phi, gain, w):
        D, E, S = phi.shape
        x_inv = torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)
        phi_inv = torch.rsqrt((phi * phi).sum(0, keepdim=True) + EPS)
        x_hat, phi_hat = x * x_inv, (phi * phi_inv).reshape(D, E * S)
        cosine = x_hat @ phi_hat
        logits = gain * cosine
        dispatch = torch.softmax(torch.where(valid.unsqueeze(-1), logits, -torch.inf), dim=1)
        combine = torch.softmax(logits, dim=-1)
        dispatch, combine = assay.stage("dispatch", dispatch), assay.stage("combine", combine)
        slots = assay.stage("slots", dispatch.transpose(1, 2) @ x)
        pre, y = torch.empty_like(slots), torch.empty_like(slots)
        for e in range(E):
            mine = slice(e * S, (e + 1) * S)
            pre[:, mine] = slots[:, mine] @ w[e]
            y[:, mine] = pre[:, mine] * torch.sigmoid(pre[:, mine])
        ctx.save_for_backward(x, x_inv, phi, phi_inv, gain, w, cosine, dispatch, combine, slots, pre, y)
        return combine @ y

    @staticmethod
    def backward(ctx, g):
        x, x_inv, phi, phi_inv, gain, w, cosine, dispatch, combine, slots, pre, y = ctx.saved_tensors
        D, E, S = phi.shape
        dcombine = g @ y.transpose(1, 2)
        dy = combine.transpose(1, 2) @ g
        dslots, dw = torch.empty_like(slots), torch.empty_like(w)
        for e in range(E):
            mine = slice(e * S, (e + 1) * S)
            gate = torch.sigmoid(pre[:, mine])
            dpre = dy[:, mine] * gate * (1 + pre[:, mine] * (1 - gate))
            dslots[:, mine] = dpre @ w[e].T
            dw[e] = torch.einsum("bsd,bsf->df", slots[:, mine], dpre)
        ddispatch = x @ dslots.transpose(1, 2)
        from_dispatch = dispatch * (ddispatch - (dispatch * ddispatch).sum(1, keepdim=True))
        from_combine = combine * (dcombine - (combine * dcombine).sum(-1, keepdim=True))
        dlogits = from_dispatch + from_combine
        dgain = (dlogits * cosine).sum().reshape(1)
        x_hat, phi_hat = x * x_inv, phi * phi_inv
        dx_hat = gain * (dlogits @ phi_hat.reshape(D, E * S).T)
        dphi_hat = gain * torch.einsum("btd,btm->dm", x_hat, dlogits).reshape(D, E, S)
        dx = dispatch @ dslots
        dx = dx + x_inv * (dx_hat - x_hat * (x_hat * dx_hat).sum(-1, keepdim=True))
        dphi = phi_inv * (dphi_hat - phi_hat * (phi_hat * dphi_hat).sum(0, keepdim=True))
        return dx, None, dphi, dgain, dw


def kernel(x, valid, phi, gain, w):
    return SoftMoE.apply(x, valid, phi, gain, w)


def target():
    return assay.Target(kernel, golden, cases=[padded, full], name="soft_moe", outputs=("out",))
