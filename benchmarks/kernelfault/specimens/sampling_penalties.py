"""p = the probabilities that the next token is drawn with, after penalties, temperature and min-p.

Logits of tokens in the prompt or in the answer are divided (if positive) or multiplied by `repetition`. A token that
the answer has n > 0 times loses frequency n + presence. Then logits are divided by `temperature`, and tokens less
likely than min_p times the likeliest one are dropped. Triton, float32: a kernel counts tokens and adjusts logits,
another one normalises.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

WORDS, PLACES = 16, 8


def allowed(repetition, temperature, min_p):
    return all(bool(((t > 0) & (t < 100)).all()) for t in (repetition, temperature)) and bool(
        ((min_p >= 0) & (min_p < 0.9)).all()
    )


@assay.case(B=[3], V=[37], P=[7], S=[15], where=allowed)
def requests(make, B, V, P, S):
    return {
        "logits": make.normal(B, V), "prompt": make.integers(0, V, B, P), "answer": make.integers(0, 8, B, S),
        "prompt_length": make.integers(1, P, B), "answer_length": make.integers(3, S, B),
        "repetition": 1.1 + make.uniform(B), "frequency": 0.3 * make.uniform(B), "presence": 0.2 + make.uniform(B),
        "temperature": 0.6 + make.uniform(B), "min_p": 0.01 + 0.04 * make.uniform(B),
    }  # fmt: skip


@assay.case(B=[2], V=[32], P=[5], S=[9], where=allowed)
def cold(make, B, V, P, S):
    drawn = requests[0].draw(make, B, V, P, S)
    return {**drawn, "logits": make.normal(V, B).mT, "temperature": 0.01 + 0.01 * make.uniform(B)}


def golden(logits, prompt, answer, prompt_length, answer_length, repetition, frequency, presence, temperature, min_p):
    word = torch.arange(logits.shape[1], device=logits.device)

    def counts(tokens, length):
        place = torch.arange(tokens.shape[1], device=tokens.device)
        return ((tokens.unsqueeze(-1) == word) & (place < length.unsqueeze(1)).unsqueeze(-1)).sum(1)

    count = counts(answer, answer_length)
    seen = (count > 0) | (counts(prompt, prompt_length) > 0)
    repeated = torch.where(logits > 0, logits / repetition.unsqueeze(1), logits * repetition.unsqueeze(1))
    z = torch.where(seen, repeated, logits)
    z = z - frequency.unsqueeze(1) * count - presence.unsqueeze(1) * (count > 0)
    z = assay.stage("z", z / temperature.unsqueeze(1))
    e = torch.exp(z - z.amax(1, keepdim=True))
    e = torch.where(e >= min_p.unsqueeze(1), e, 0.0)
    return e / e.sum(1, keepdim=True)


@triton.jit
def _count(token_ptr, length, word, PLACES: tl.constexpr, WORDS: tl.constexpr):
    acc = tl.zeros([WORDS], tl.int32)
    for start in range(0, length, PLACES):
        s = start + tl.arange(0, PLACES)
        token = tl.load(token_ptr + s, mask=s < length, other=-1)
        acc += tl.sum((token[:, None] == word[None, :]).to(tl.int32), 0)
    return acc


@triton.jit
def _adjust_kernel(x_ptr, prompt_ptr, answer_ptr, prompt_length_ptr, answer_length_ptr, repetition_ptr, frequency_ptr,
                   presence_ptr, temperature_ptr, z_ptr, sxb, sxv, V, P, S,
                   WORDS: tl.constexpr, PLACES: tl.constexpr):  # fmt: skip
    b = tl.program_id(0)
    v = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    in_prompt = _count(prompt_ptr + b * P, tl.load(prompt_length_ptr + b), v, PLACES, WORDS)
    count = _count(answer_ptr + b * S, tl.load(answer_length_ptr + b), v, PLACES, WORDS)
    repetition = tl.load(repetition_ptr + b)
    x = tl.load(x_ptr + b * sxb + v * sxv, mask=v < V, other=0.0)
    seen = (count > 0) | (in_prompt > 0)
    z = tl.where(seen, tl.where(x > 0, x / repetition, x * repetition), x)
    z -= tl.load(frequency_ptr + b) * count + tl.where(count > 0, tl.load(presence_ptr + b), 0.0)
    tl.store(z_ptr + b * V + v, z / tl.load(temperature_ptr + b), mask=v < V)


@triton.jit
def _normalise_kernel(z_ptr, min_p_ptr, p_ptr, V, WORDS: tl.constexpr):
    b = tl.program_id(0)
    min_p = tl.load(min_p_ptr + b)
    top = -float("inf")
    for start in range(0, V, WORDS):
        v = start + tl.arange(0, WORDS)
        top = tl.maximum(top, tl.max(tl.load(z_ptr + b * V + v, mask=v < V, other=-float("inf")), 0))
    total = 0.0
    for start in range(0, V, WORDS):
        v = start + tl.arange(0, WORDS)
        e = tl.exp(tl.load(z_ptr + b * V + v, mask=v < V, other=-float("inf")) - top)
        total += tl.sum(tl.where(e >= min_p, e, 0.0), 0)
    for start in range(0, V, WORDS):
        v = start + tl.arange(0, WORDS)
        e = tl.exp(tl.load(z_ptr + b * V + v, mask=v < V, other=-float("inf")) - top)
        tl.store(p_ptr + b * V + v, tl.where(e >= min_p, e, 0.0) / total, mask=v < V)


def kernel(logits, prompt, answer, prompt_length, answer_length, repetition, frequency, presence, temperature, min_p):
    B, V = logits.shape
    prompt, answer = prompt.contiguous(), answer.contiguous()
    lengths = prompt_length.contiguous(), answer_length.contiguous()
    penalties = repetition.contiguous(), frequency.contiguous(), presence.contiguous()
    z, p = logits.new_empty(B, V), logits.new_empty(B, V)
    _adjust_kernel[(B, triton.cdiv(V, WORDS))](
        logits, prompt, answer, *lengths, *penalties, temperature.contiguous(), z, *logits.stride(), V,
        prompt.shape[1], answer.shape[1], WORDS, PLACES,
    )  # fmt: skip
    z = assay.stage("z", z)
    _normalise_kernel[(B,)](z, min_p.contiguous(), p, V, WORDS)
    return p


def target():
    return assay.Target(
        kernel, golden, cases=[requests, cold], name="sampling_penalties", outputs=("p",), backward=None
    )  # fmt: skip
