"""Goldens: hyper-connections in plain torch, written from the projects' documentation without our code."""

import torch


def sinkhorn_deepseek(logits, iterations, eps):
    p = torch.softmax(logits, -1) + eps
    p = p / (p.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        p = p / (p.sum(-1, keepdim=True) + eps)
        p = p / (p.sum(-2, keepdim=True) + eps)
    return p


def sinkhorn_log(logits, iterations):
    f, g = torch.zeros_like(logits[..., :1]), torch.zeros_like(logits[..., :1, :])
    for _ in range(iterations):
        f = -torch.logsumexp(logits + g, -1, keepdim=True)
        g = -torch.logsumexp(logits + f, -2, keepdim=True)
    return torch.exp(f + logits + g)


def mixes(flat, weight, rms_eps):
    """The normalised, flattened streams of a token times weight^T: one number per mix."""
    return (flat @ weight.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)


def hf_connection(x, fn, base, scale, layer, iterations=20, hc_eps=1e-6, rms_eps=1e-6):
    """transformers' DeepseekV4HyperConnection as DeepseekV4DecoderLayer uses it; x [..., n, dim]."""
    n = x.shape[-2]
    pre, post, comb = mixes(x.flatten(-2), fn, rms_eps).split([n, n, n * n], -1)
    b_pre, b_post, b_comb = base.split([n, n, n * n])
    pre = torch.sigmoid(pre * scale[0] + b_pre) + hc_eps
    post = 2 * torch.sigmoid(post * scale[1] + b_post)
    comb = sinkhorn_deepseek((comb * scale[2] + b_comb).unflatten(-1, (n, n)), iterations, hc_eps)
    f = layer((pre.unsqueeze(-1) * x).sum(-2))
    return post.unsqueeze(-1) * f.unsqueeze(-2) + comb.mT @ x


def liger_connection(x, phi, b, alpha_pre, alpha_post, alpha_res, layer, tmax=20, rms_eps=1e-6, sinkhorn_eps=1e-6):
    """LigerMHC: x_out[o] = sum_i h_res[o, i] x[i] + h_post[o] f; its pre_eps is 0."""
    n = x.shape[-2]
    pre, post, res = mixes(x.flatten(-2), phi.T, rms_eps).split([n, n, n * n], -1)
    b_pre, b_post, b_res = b.split([n, n, n * n])
    h_pre = torch.sigmoid(alpha_pre * pre + b_pre)
    h_post = 2 * torch.sigmoid(alpha_post * post + b_post)
    h_res = sinkhorn_deepseek((alpha_res * res + b_res).unflatten(-1, (n, n)), tmax, sinkhorn_eps)
    return h_res @ x + h_post.unsqueeze(-1) * layer((h_pre.unsqueeze(-1) * x).sum(-2)).unsqueeze(-2)


def te_connection(x, phi, alpha, beta, norm_weight, layer, iterations=20):
    """TransformerEngine's mHC: x [..., C, n], streams innermost; rms_eps is float32's epsilon, Sinkhorn in logs."""
    n = x.shape[-1]
    weight = phi if norm_weight is None else phi * norm_weight
    pre, post, res = mixes(x.flatten(-2), weight, 2.0**-23).split([n, n, n * n], -1)
    b_pre, b_post, b_res = beta.reshape(-1).split([n, n, n * n])
    h_pre = torch.sigmoid(alpha[0] * pre + b_pre)
    h_post = 2 * torch.sigmoid(alpha[1] * post + b_post)
    h_res = sinkhorn_log((alpha[2] * res + b_res).unflatten(-1, (n, n)), iterations)
    f = layer((x * h_pre.unsqueeze(-2)).sum(-1))
    return x @ h_res + f.unsqueeze(-1) * h_post.unsqueeze(-2)


def rms_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def lagged_stack(x, connections, layer, iterations=20, hc_eps=1e-6, rms_eps=1e-6):
    """DeepSeek-V4.1 in sglang 0.5.23 (hc_pre_from_prev_sublayer); connections are (fn, base, scale, ...) each.

    The input of a sublayer is collapsed with the pre that the sublayer before predicted; stream 0 enters the first.
    """
    n, used = x.shape[-2], None
    for fn, base, scale, *weights in connections:
        pre, post, comb = mixes(x.flatten(-2), fn, rms_eps).split([n, n, n * n], -1)
        b_pre, b_post, b_comb = base.split([n, n, n * n])
        post = 2 * torch.sigmoid(post * scale[1] + b_post)
        comb = sinkhorn_deepseek((comb * scale[2] + b_comb).unflatten(-1, (n, n)), iterations, hc_eps)
        h_in = x[..., 0, :] if used is None else (used.unsqueeze(-1) * x).sum(-2)
        x = post.unsqueeze(-1) * layer(h_in, *weights).unsqueeze(-2) + comb.mT @ x
        used = torch.sigmoid(pre * scale[0] + b_pre) + hc_eps
    return (used.unsqueeze(-1) * x).sum(-2)


def sinkhorn_megatron(logits, iterations, eps):
    p = torch.exp(logits - logits.amax(-1, keepdim=True))
    for _ in range(iterations):
        p = p / p.sum(-1, keepdim=True).clamp(min=eps)
        p = p / p.sum(-2, keepdim=True).clamp(min=eps)
    return p


def megatron_connection(x, weight, bias, alphas, layer, *, first_release=False, iterations=20, eps=1e-6):
    """Megatron-LM's HyperConnectionModule: r = 1 / (|X| / sqrt(K) + eps). The first release had another Sinkhorn."""
    n, flat = x.shape[-2], x.flatten(-2)
    r = 1 / (torch.linalg.vector_norm(flat, dim=-1, keepdim=True) / flat.shape[-1] ** 0.5 + eps)
    alpha = torch.cat([a.expand(size) for a, size in zip(alphas, (n, n, n * n), strict=True)])
    pre, post, res = (r * (flat @ weight.T) * alpha + bias).split([n, n, n * n], -1)
    pre, post, res = (
        torch.sigmoid(pre) + (0 if first_release else eps),
        2 * torch.sigmoid(post),
        res.unflatten(-1, (n, n)),
    )
    res = (sinkhorn_megatron if first_release else sinkhorn_deepseek)(res, iterations, eps)
    f = layer((pre.unsqueeze(-1) * x).sum(-2))
    return (res if first_release else res.mT) @ x + post.unsqueeze(-1) * f.unsqueeze(-2)
