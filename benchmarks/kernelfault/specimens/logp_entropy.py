"""logp = z_label - lse,  entropy = lse - sum_v p_v z_v,  z = cap tanh(x / cap) / temperature,  p = softmax(z).

What policy-gradient training asks of a language model's head for each token of a batch: the log-probability of the
token that was sampled and the entropy of the distribution, of capped logits at a temperature. A token with the label
-100 is padding: both are 0. Triton, float32: a program per token walks over the vocabulary in blocks with a running
maximum, and again in the backward, which writes the logits' gradient from lse and the entropy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK_V = 16
PADDING = -100


@assay.case(N=[5], V=[37])
def tokens(make, N, V):
    labels = make.integers(0, V, N)
    labels[1::3] = PADDING
    return {"logits": make.normal(N, V, std=2.0), "labels": labels, "cap": 6.0, "temperature": 0.7}


@assay.case(N=[4], V=[32])
def shifted_rows(make, N, V):
    logits = 2 * make.normal(N, V) + 5 * make.normal(N, 1)
    return {"logits": logits, "labels": make.integers(0, V, N), "cap": 30.0, "temperature": 1.5}


@assay.case(N=[3], V=[20])
def columns_first(make, N, V):
    return {**tokens[0].draw(make, N, V), "logits": make.normal(V, N).T, "temperature": 1.0}


def golden(logits, labels, cap, temperature):
    kept = labels != PADDING
    z = cap * torch.tanh(logits / cap) / temperature
    lse = assay.stage("lse", torch.logsumexp(z, -1))
    logp = z.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1) - lse
    entropy = lse - (torch.exp(z - lse.unsqueeze(1)) * z).sum(-1)
    zero = torch.zeros_like(lse)
    return torch.where(kept, logp, zero), torch.where(kept, entropy, zero)


# n token, v vocabulary
@triton.jit
def _tanh(x):
    fade = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - fade) / (1.0 + fade)
    return tl.where(x < 0, -size, size)


@triton.jit
def _fwd_kernel(x_ptr, label_ptr, logp_ptr, entropy_ptr, lse_ptr, V, cap, inv_temperature, PADDING: tl.constexpr,
                BLOCK_V: tl.constexpr):  # fmt: skip
    n = tl.program_id(0)
    label = tl.load(label_ptr + n)
    top = -float("inf")
    total = 0.0
    weighted = 0.0
    for first in range(0, V, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        x = tl.load(x_ptr + n * V + v, mask=v < V, other=0.0)
        z = cap * _tanh(x / cap) * inv_temperature
        new = tl.maximum(top, tl.max(tl.where(v < V, z, -float("inf")), 0))
        e = tl.where(v < V, tl.exp(z - new), 0.0)
        fade = tl.exp(top - new)
        total = total * fade + tl.sum(e)
        weighted = weighted * fade + tl.sum(e * z)
        top = new
    lse = top + tl.log(total)
    tl.store(lse_ptr + n, lse)
    if label == PADDING:
        tl.store(logp_ptr + n, 0.0)
        tl.store(entropy_ptr + n, 0.0)
    else:
        x_label = tl.load(x_ptr + n * V + label)
        z_label = cap * _tanh(x_label / cap) * inv_temperature
        tl.store(logp_ptr + n, z_label - lse)
        tl.store(entropy_ptr + n, lse - weighted / total)


@triton.jit
def _bwd_kernel(x_ptr, label_ptr, g_logp_ptr, g_entropy_ptr, entropy_ptr, lse_ptr, dx_ptr, V, cap, inv_temperature,
                PADDING: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    n = tl.program_id(0)
    label = tl.load(label_ptr + n)
    lse = tl.load(lse_ptr + n)
    entropy = tl.load(entropy_ptr + n)
    g_logp = tl.load(g_logp_ptr + n)
    g_entropy = tl.load(g_entropy_ptr + n)
    if label == PADDING:
        g_logp = 0.0
        g_entropy = 0.0
    for first in range(0, V, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        x = tl.load(x_ptr + n * V + v, mask=v < V, other=0.0)
        bent = _tanh(x / cap)
        logp = cap * bent * inv_temperature - lse
        p = tl.exp(logp)
        hit = tl.where(v == label, 1.0, 0.0)
        dz = g_logp * (hit - p) - g_entropy * p * (logp + entropy)
        dx = dz * inv_temperature * (1.0 - bent * bent)
        tl.store(dx_ptr + n * V + v, dx, mask=v < V)


class LogpEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, cap, temperature):
        logits, labels = logits.contiguous(), labels.contiguous()
        N, V = logits.shape
        logp, entropy, lse = logits.new_empty(N), logits.new_empty(N), logits.new_empty(N)
        settings = V, cap, 1 / temperature, PADDING, BLOCK_V
        _fwd_kernel[(N,)](logits, labels, logp, entropy, lse, *settings)
        lse = assay.stage("lse", lse)
        ctx.save_for_backward(logits, labels, entropy, lse)
        ctx.settings = settings
        return logp, entropy

    @staticmethod
    def backward(ctx, g_logp, g_entropy):
        logits, labels, entropy, lse = ctx.saved_tensors
        g_logp, g_entropy = g_logp.contiguous(), g_entropy.contiguous()
        dx = torch.empty_like(logits)
        _bwd_kernel[(len(logits),)](logits, labels, g_logp, g_entropy, entropy, lse, dx, *ctx.settings)
        return dx, None, None, None


def kernel(logits, labels, cap, temperature):
    return LogpEntropy.apply(logits, labels, cap, temperature)


def target():
    cases = [tokens, shifted_rows, columns_first]
    return assay.Target(kernel, golden, cases=cases, name="logp_entropy", outputs=("logp", "entropy"))
