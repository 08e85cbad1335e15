"""Attention with a backward of its own, causal or not, in torch. The backward masks later keys whatever the flag says.

After https://github.com/triton-lang/triton/issues/4541 (michaelfeil, 2024).
"""

import torch

from goldsmith import assay


def later_keys(T, causal, device):
    t = torch.arange(T, device=device)
    return (t[:, None] < t) & causal


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        scale = q.shape[-1] ** -0.5
        score = (q @ k.mT * scale).masked_fill(later_keys(len(q), causal, q.device), -torch.inf)
        log_sum = torch.logsumexp(score, -1, keepdim=True)
        y = (score - log_sum).exp() @ v
        ctx.save_for_backward(q, k, v, y, log_sum)
        ctx.causal, ctx.scale = causal, scale
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, y, log_sum = ctx.saved_tensors
        p = (q @ k.mT * ctx.scale - log_sum).exp()
        p = p.masked_fill(later_keys(len(q), True, q.device), 0)
        dv = p.mT @ dy
        dp = dy @ v.mT
        dscore = p * (dp - (dy * y).sum(-1, keepdim=True)) * ctx.scale
        return dscore @ k, dscore.mT @ q, dv, None


def golden(q, k, v, causal):
    T, D = q.shape
    score = q @ k.mT * D**-0.5
    if causal:
        score = score.masked_fill(torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return torch.softmax(score, -1) @ v


@assay.case(T=[5], D=[4], causal=[True, False])
def heads(make, T, D, causal):
    return {"q": make.normal(T, D), "k": make.normal(T, D), "v": make.normal(T, D), "causal": causal}


target = assay.Target(Attention.apply, golden, cases=heads, name="causal_flag")
