"""Typical mistakes of row kernels: rmsnorm, softmax, cross-entropy, attention, top-k."""

from __future__ import annotations

import math

import torch

from goldsmith import assay

from .registry import wrong

# y = x / rms(x) * w


@assay.case(T=[13], D=[100])
def rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "eps": 1e-6}


@assay.case(T=[13], D=[100])
def small_rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}


def rmsnorm(x, w, eps):
    inv_rms = assay.stage("inv_rms", torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    return x * inv_rms * w


def norm(change):
    """rmsnorm in float32, with `change(x, w, eps)` as its middle part."""

    def kernel(x, w, eps):
        return change(x.float(), w.float(), eps).to(x.dtype)

    return kernel


def _rms(x, eps):
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _inv_sum_of(x, n, eps):
    return torch.rsqrt(x[:, :n].square().sum(-1, keepdim=True) / x.shape[1] + eps)


def _bf16_accumulator(x, w, eps):
    total = torch.zeros(len(x), 1, dtype=torch.bfloat16)
    for block in x.square().split(4, 1):
        total = (total + block.sum(-1, keepdim=True)).bfloat16()
    return x * torch.rsqrt(total.float() / x.shape[1] + eps) * w


def _one_element(x, w, eps):
    y = x * _rms(x, eps) * w
    mask = torch.zeros_like(y)
    mask[7, 41] = 2.0**-10
    return y * (1 + mask)


NORMS = (
    ("W02", "the last element is not in the sum", lambda x, w, e: x * _inv_sum_of(x, x.shape[1] - 1, e) * w),
    ("G09", "the factor w is dropped", lambda x, w, e: x * _rms(x, e) + 0 * w),
    ("G10", "the factor w is applied twice", lambda x, w, e: x * _rms(x, e) * w * w),
    ("G11", "the mean runs over the rows", lambda x, w, e: x * torch.rsqrt(x.square().mean(0, keepdim=True) + e) * w),
    ("G13", "a bfloat16 accumulator", _bf16_accumulator),
    ("G24", "times 1 + 2^-12", lambda x, w, e: x * _rms(x, e) * w * (1 + 2.0**-12)),
    ("G25", "one element is off by 2^-10", _one_element),
    (
        "G12",
        "eps outside of the root",
        lambda x, w, e: x / (x.square().mean(-1, keepdim=True).sqrt() + 3e-4 * e**0.25) * w,
    ),
    ("W03", "eps is forgotten", lambda x, w, e: x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * w),
    ("G28", "nan_to_num inside", lambda x, w, e: torch.nan_to_num(x * _rms(x, e) * w)),
    ("W04", "the sum runs over |x|", lambda x, w, e: x / (x.abs().mean(-1, keepdim=True) + e) * w),
)

for _id, _what, _change in NORMS:
    wrong(_id, "rmsnorm", _what)(lambda change=_change: assay.Target(norm(change), rmsnorm, cases=rows, name="rmsnorm"))


@wrong("W00", "rmsnorm", "rmsnorm as it should be", right=True)
def _right_norm():
    return assay.Target(norm(lambda x, w, e: x * _rms(x, e) * w), rmsnorm, cases=rows, name="rmsnorm")


def _scale_free(x, w):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * w


@wrong("M14", "rmsnorm", "an absolute 1e-9 inside, where the golden has none (seen at small scale only, in bfloat16)")
def _absolute_eps():
    def kernel(x, w):
        return (x.float() * _rms(x.float(), 1e-9) * w.float()).to(x.dtype)

    return assay.Target(kernel, _scale_free, cases=small_rows, name="rmsnorm", dtypes=(torch.bfloat16,))


@wrong("G14", "rmsnorm", "a truncating store to bfloat16")
def _truncating():
    def kernel(x, w, eps):
        y = x.float() * _rms(x.float(), eps) * w.float()
        return ((y.view(torch.int32) & -65536).view(torch.float32) - y).detach().add(y).to(x.dtype)

    return assay.Target(kernel, rmsnorm, cases=rows, name="rmsnorm", dtypes=(torch.bfloat16,))


@wrong("W05", "rmsnorm", "times 1.002 in bfloat16 (seen with float32 inputs)")
def _small_factor():
    def kernel(x, w, eps):
        return (x.float() * _rms(x.float(), eps) * w.float() * 1.002).to(x.dtype)

    return assay.Target(kernel, rmsnorm, cases=rows, name="rmsnorm", dtypes=(torch.bfloat16,))


@wrong("M15", "rmsnorm", "the golden computes in float32", fault="reference_fault")
def _narrow_golden():
    def narrow(x, w, eps):
        return rmsnorm(x.float(), w.float(), eps)

    return assay.Target(norm(lambda x, w, e: x * _rms(x, e) * w), narrow, cases=rows, name="rmsnorm")


@wrong("W06", "rmsnorm", "the golden's own backward is wrong", fault="reference_fault")
def _wrong_golden_backward():
    def golden_backward(x, w, eps, grad_y):
        inv_rms = _rms(x, eps)
        return {"x": grad_y * w * inv_rms, "w": (grad_y * x * inv_rms).sum(0)}

    return assay.Target(
        norm(lambda x, w, e: x * _rms(x, e) * w), rmsnorm, cases=rows, name="rmsnorm", golden_backward=golden_backward
    )


# softmax


@assay.case(T=[9], D=[77])
def logits(make, T, D):
    return {"x": make.normal(T, D)}


def softmax(x):
    return torch.softmax(x, -1)


def _online(x, rescale):
    top = torch.full((len(x), 1), -math.inf)
    total = torch.zeros(len(x), 1)
    for block in x.split(16, 1):
        new = torch.maximum(top, block.amax(-1, keepdim=True))
        total = total * (torch.exp(top - new) if rescale else 1.0) + torch.exp(block - new).sum(-1, keepdim=True)
        top = new
    return torch.exp(x - top) / total


def _padded(x, fill):
    wide = torch.nn.functional.pad(x, (0, 128 - x.shape[1]), value=fill)
    e = torch.exp(wide - wide.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True))[:, : x.shape[1]]


def _padded_max(x):
    wide = torch.nn.functional.pad(x, (0, 128 - x.shape[1]), value=0.0)
    e = torch.exp(x - wide.amax(-1, keepdim=True).clamp(min=30.0))
    return e / e.sum(-1, keepdim=True)


for _id, _what, _kernel in (
    ("G22", "softmax without the maximum", lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)),
    ("G23", "online softmax without the rescale", lambda x: _online(x, False)),
    ("G01", "the tail of the block is not masked", lambda x: _padded(x, 0.0)),
    ("G04", "padding takes part in the maximum", _padded_max),
    ("W07", "the result is clamped away from zero", lambda x: torch.softmax(x, -1).clamp(min=1e-12)),
):
    wrong(_id, "softmax", _what)(lambda kernel=_kernel: assay.Target(kernel, softmax, cases=logits, name="softmax"))


@wrong("W08", "softmax", "an online softmax as it should be", right=True)
def _right_online():
    return assay.Target(lambda x: _online(x, True), softmax, cases=logits, name="softmax")


# causal attention


@assay.case(S=[17], D=[16])
def heads(make, S, D):
    return {"q": make.normal(2, S, D), "k": make.normal(2, S, D), "v": make.normal(2, S, D)}


def attention(q, k, v):
    s = q @ k.mT / math.sqrt(q.shape[-1])
    s = s.masked_fill(~_mask(q, 0), -math.inf)
    return assay.stage("p", torch.softmax(s, -1)) @ v


def _mask(q, shift):
    S = q.shape[-2]
    return torch.ones(S, S, dtype=torch.bool).tril(shift)


def _blocked(q, k, v, shift=0, scale=None, drop=None):
    """Keys in blocks of 8 with an online softmax; blocks beyond the diagonal are skipped."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out = []
    for i in range(q.shape[-2]):
        last = min(i + 1 + shift, k.shape[-2])
        top, total, acc = q.new_full((len(q), 1), -math.inf), 0.0, 0.0
        for lo in range(0, last, 8):
            if drop is not None and lo == drop:
                continue
            hi = min(lo + 8, last)
            s = (q[:, i : i + 1] @ k[:, lo:hi].mT).squeeze(1) * scale
            new = torch.maximum(top, s.amax(-1, keepdim=True))
            p = torch.exp(s - new)
            total = total * torch.exp(top - new) + p.sum(-1, keepdim=True)
            acc = acc * torch.exp(top - new) + (p.unsqueeze(1) @ v[:, lo:hi]).squeeze(1)
            top = new
        out.append(acc / total)
    return torch.stack(out, 1)


for _id, _what, _kernel in (
    ("G21", "the causal mask is shifted by one", lambda q, k, v: _blocked(q, k, v, shift=1)),
    ("W09", "the scale is 1 / D", lambda q, k, v: _blocked(q, k, v, scale=1 / 16)),
    ("W10", "the last block of keys is skipped", lambda q, k, v: _blocked(q, k, v, drop=16)),
    ("M09", "v and k are exchanged", lambda q, k, v: _blocked(q, v, k)),
):
    wrong(_id, "attention", _what)(
        lambda kernel=_kernel: assay.Target(kernel, attention, cases=heads, name="attention")
    )


@wrong("W11", "attention", "attention in blocks as it should be", right=True)
def _right_attention():
    return assay.Target(_blocked, attention, cases=heads, name="attention")


# top-k routing


@assay.case(T=[32], E=[16])
def tied(make, T, E):
    return {"scores": make.tied(T, E), "x": make.normal(T), "k": 4}


@assay.case(T=[32], E=[16])
def untied(make, T, E):
    return {"scores": make.normal(T, E), "x": make.normal(T), "k": 4}


def route(scores, x, k):
    index = assay.stage("index", scores.topk(k, -1).indices)
    return {"weight": scores.gather(-1, index) * x.unsqueeze(-1), "index": index}


def _lowest_first(scores, x, k):
    """The lowest index among equal scores, where torch takes any."""
    index = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]
    return {"weight": scores.gather(-1, index) * x.unsqueeze(-1), "index": index}


def _routed(change):
    def kernel(scores, x, k):
        index = change(scores, k)
        return {"weight": scores.gather(-1, index) * x.unsqueeze(-1), "index": index}

    return kernel


def _second_best(scores, k):
    return scores.topk(k + 1, -1).indices[:, 1:]


def _twice(scores, k):
    index = scores.topk(k, -1).indices.clone()
    index[3, 1] = index[3, 0]
    return index


def _router(kernel, cases=untied):
    decisions = {"index": assay.topk(scores="scores", k="k")}
    return assay.Target(kernel, route, cases=cases, name="router", decisions=decisions)


@wrong("M01", "router", "ties in another order", right=True)
def _ties():
    return _router(_lowest_first, cases=tied)


wrong("W12", "router", "the best score is passed over")(lambda: _router(_routed(_second_best)))
wrong("W13", "router", "one expert is chosen twice")(lambda: _router(_routed(_twice)))
wrong("W14", "router", "the chosen are in ascending order")(
    lambda: _router(_routed(lambda s, k: s.topk(k, -1).indices.flip(-1)))
)
