"""experts.moe: test cases."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...assay.declare.case import Case, Make
from .._conventions import BASE, FACTORS, PARTS, TARGETS, wide
from ..benchmarks import MOE as BENCH
from ..packed.packing import pack

__all__ = ["BENCH", "CASES", "DTYPES", "SIZES", "STORED", "inputs", "routing"]

DTYPES = ("float32", "bfloat16")  # float16 runs on GPUs only
# stages that a backend may round to x's dtype: operands of matrix products, because AMX needs equal dtypes; for grouped
# products also the results, which have the dtype of the operands
_OPERANDS = ("h", "dg", "du")
_PRODUCTS = ("q", *(f"d{name}" for name in (*BASE, *FACTORS)))
_PRODUCTS += tuple(f"{t}_{what}" for t in TARGETS for what in PARTS)
STORED = {
    "native": dict.fromkeys(_OPERANDS, "x"),
    "cuda_grouped": dict.fromkeys((*_OPERANDS, *_PRODUCTS), "x"),
}


def routing(make: Make, batch: tuple[int, ...], E: int, k: int, kind: str) -> Tensor:
    """Expert ids [*batch, k] of a kind: "uniform" (no repeats if k <= E), "twice" (slot 1 repeats slot 0), "holes"
    (about a third is -1, and the whole first token), "none" (all -1), "one" (all to the last expert)
    """
    if kind in ("none", "one"):
        return torch.full((*batch, k), -1 if kind == "none" else E - 1, dtype=torch.int64, device=make.device)
    scores = make.uniform(*batch, max(E, k), dtype=torch.float32)
    ids = scores.topk(k).indices % E
    if kind == "twice" and k > 1:
        ids[..., 1] = ids[..., 0]
    if kind == "holes":
        ids = torch.where(make.uniform(*batch, k, dtype=torch.float32) < 0.35, -1, ids)
        if batch:
            ids[(0,) * len(batch)] = -1
    return ids


def inputs(
    make: Make,
    T: int | tuple[int, ...],
    H: int = 6,
    I: int = 5,
    E: int = 2,
    k: int = 2,
    r: int | dict[str, int] = 2,
    on: tuple[str, ...] = ("gate", "up", "down"),
    bias: bool = False,
    activation: str = "silu",
    limit: float | None = None,
    kind: str = "uniform",
    factors: torch.dtype | None = None,
    layout: str = "contiguous",
    dropout: float = 0.0,
    numbers: bool = False,
    weights: str = "wide",
    scale: float = 1.0,
    base: float = 1.0,
    b: float = 1.0,
    packed: str = "",
    group: int | None = None,
    partitions: int = 1,
) -> dict[str, object]:
    """Arguments of experts.moe; T is the number of tokens, or all leading dimensions.

    r, on: rank, and the projections with LoRA; factors: dtype of LoRA; base, b: scales of W and B
    layout "strided": x, A and B are every second column of wider tensors, and the base is transposed
    numbers: whether each token has a number for its dropout masks
    weights "own": topk_weights in x's dtype; "zeros": a third of them is 0
    scale: scale of x
    packed: format of a packed base; group, partitions: its group size and slices
    """
    batch = T if isinstance(T, tuple) else (T,)
    to = wide(make.dtype)
    step = 2 if layout == "strided" else 1

    def drawn(*shape: int, std: float, dtype: torch.dtype | None = None) -> Tensor:
        return make.normal(*shape[:-1], shape[-1] * step, std=std, dtype=dtype)[..., ::step]

    def weight(out: int, width: int) -> Tensor:
        std = base * width**-0.5
        return make.normal(E, width, out, std=std).mT if layout == "strided" else make.normal(E, out, width, std=std)

    arguments: dict[str, object] = dict.fromkeys(("gate_up_bias", "down_bias", "seed"))
    for name, out, width in (("gate", I, H), ("up", I, H), ("down", H, I)):
        rank = r[name] if isinstance(r, dict) else r
        a = drawn(E, rank, width, std=width**-0.5, dtype=factors or to) if name in on else None
        arguments[f"{name}_a"] = a
        arguments[f"{name}_b"] = drawn(E, out, rank, std=b, dtype=factors or to) if name in on else None
    if bias:
        arguments |= {"gate_up_bias": make.normal(E, 2 * I), "down_bias": make.normal(E, H)}
    if dropout:
        tokens = math.prod(batch) if numbers else 0
        arguments["seed"] = make.integers(0, 2**62, 1 + tokens) if numbers else make.integers(0, 2**62)
    shares = make.uniform(*batch, k, dtype=make.dtype if weights == "own" else to)
    if weights == "zeros":
        shares = torch.where(make.uniform(*batch, k, dtype=to) < 0.35, torch.zeros_like(shares), shares)
    gate_up, down = weight(2 * I, H), weight(H, I)
    if packed:
        stored = pack(gate_up.float(), down.float(), format=packed, group_size=group, partitions=partitions)
        gate_up, down = stored.gate_up.to(make.device), stored.down.to(make.device)
    return arguments | {
        "x": drawn(*batch, H, std=scale),
        "topk_ids": routing(make, batch, E, k, kind),
        "topk_weights": shares,
        "gate_up": gate_up,
        "down": down,
        "layout": stored.layout.text if packed else "",
        "gate_scale": 0.5,
        "up_scale": 0.7,
        "down_scale": 1.3,
        "dropout": dropout,
        "activation": activation,
        "alpha": 1.702,
        "limit": limit,
        "save": True,
    }


SIZES: dict[str, tuple[dict[str, object], str]] = {
    "no_tokens": ({"T": 0, "bias": True}, "empty output, gradients of the parameters exactly 0"),
    "one_token": ({"T": 1, "H": 8, "I": 8, "r": 4}, "decoding"),
    "few_tokens": ({"T": 7, "E": 4}, "odd H and I; each expert has some routes"),
    "one_of_each": ({"T": 3, "H": 1, "I": 1, "r": 1, "E": 2, "k": 1}, "blocks are almost completely masked"),
    "odd_sizes": ({"T": 9, "H": 33, "I": 17, "r": 3}, "one more than powers of two"),
    "bfloat16_factors": ({"T": 5, "factors": torch.bfloat16}, "LoRA in bfloat16 for any dtype of x"),
    "no_lora": ({"T": 5, "E": 3, "on": ()}, "only the base"),
    "gate_alone": ({"T": 5, "on": ("gate",)}, "LoRA on one projection"),
    "up_alone": ({"T": 5, "on": ("up",)}, "LoRA on one projection"),
    "down_alone": ({"T": 5, "on": ("down",)}, "LoRA on one projection"),
    "ranks": ({"T": 5, "r": {"gate": 1, "up": 3, "down": 17}}, "a different rank on each projection; one above I"),
    "rank_zero": ({"T": 4, "r": 0}, "LoRA adds nothing, its gradients have no elements"),
    "zero_b": ({"T": 5, "b": 0.0}, "a new LoRA: only the base contributes to y and dx, only B has a gradient"),
    "zero_base": ({"T": 5, "base": 0.0}, "only LoRA contributes, to y and to every gradient"),
    "gpt_oss": (
        {"T": 3, "H": 4, "I": 3, "bias": True, "activation": "swiglu_oai", "limit": 1.0},
        "clamped on both sides, with biases",
    ),
    "gelu": ({"T": 5, "activation": "gelu"}, "erf form"),
    "gelu_tanh": ({"T": 5, "activation": "gelu_tanh"}, "tanh approximation"),
    "relu2": ({"T": 5, "activation": "relu2"}, "half of h is 0"),
    "limit": ({"T": 7, "limit": 0.8}, "clamped before silu: gradients stop beyond the limit"),
    "holes": ({"T": 9, "E": 4, "k": 3, "kind": "holes", "bias": True}, "-1 is skipped; one token has only -1"),
    "nothing": ({"T": 4, "kind": "none", "bias": True}, "every id -1: zeros everywhere"),
    "no_slots": ({"T": 4, "k": 0}, "k = 0: zeros everywhere"),
    "twice": ({"T": 5, "E": 3, "k": 3, "kind": "twice"}, "an expert that a token lists twice counts twice"),
    "one_expert": ({"T": 5, "E": 3, "kind": "one"}, "every route goes to the last expert, the others have no routes"),
    "zero_weights": (
        {"T": 5, "E": 3, "k": 3, "weights": "zeros"},
        "a weight of 0 has a gradient like any other; k = E",
    ),
    "small": ({"T": 5, "scale": 1e-4}, "outputs of 1e-4: bounds scale with them"),
    "large_values": ({"T": 5, "scale": 1e4}, "outputs of 1e4 and more"),
    "leading_dimensions": (
        {"T": (2, 1, 3), "weights": "own"},
        "any leading dimensions; topk_weights in x's dtype",
    ),
    "no_leading_dimension": ({"T": ()}, "one token without a batch"),
    "strided": ({"T": 5, "layout": "strided"}, "x, A and B are slices of wider tensors, the base is transposed"),
    "dropout": ({"T": 5, "E": 3, "k": 3, "dropout": 0.3, "kind": "holes"}, "masks by token, slot and feature"),
    "numbered_tokens": ({"T": 5, "dropout": 0.3, "numbers": True}, "masks of a rank that has some of the tokens"),
    "many_tokens": ({"T": 33, "H": 20, "I": 12, "E": 5, "k": 3}, "an expert has more routes than a block has rows"),
    "threads": ({"T": 16, "H": 96, "I": 128, "E": 8}, "enough weights for two threads: smaller cases run on one"),
    "fp32": ({"T": 5, "packed": "fp32", "partitions": 3}, "packed without rounding; slices with group size 1"),
    "bf16": (
        {"T": 5, "H": 33, "I": 17, "packed": "bf16", "bias": True},
        "two weights per word, odd sizes",
    ),
    "bf16_slices": (
        {"T": 5, "H": 7, "I": 5, "packed": "bf16", "partitions": 7},
        "slices of size 1, two are empty",
    ),
    "int8": ({"T": 5, "H": 9, "I": 7, "packed": "int8", "partitions": 2}, "one scale per row, shared by the slices"),
    "int8_groups": ({"T": 5, "H": 24, "I": 16, "packed": "int8", "group": 8}, "one scale per 8 inputs"),
    "int4": (
        {"T": 5, "H": 24, "I": 16, "packed": "int4", "group": 8},
        "eight weights per word, a scale per 8 inputs",
    ),
    "int4_slices": (
        {"T": 5, "H": 16, "I": 40, "packed": "int4", "group": 8, "partitions": 3, "kind": "holes", "k": 3},
        "slices of 2, 2 and 1 groups",
    ),
    "int4_asym": ({"T": 5, "H": 24, "I": 16, "packed": "int4_asym", "group": 8, "partitions": 2}, "a zero per group"),
    "mxfp4": ({"T": 5, "H": 32, "I": 64, "packed": "mxfp4", "partitions": 2, "bias": True}, "E2M1 with E8M0 scales"),
    "fp8_block": (
        {"T": 5, "H": 20, "I": 130, "E": 2, "packed": "fp8_block", "partitions": 2},
        "one scale per 128 x 128, the last block has 2 rows",
    ),
    "int4_tiles": (
        {"T": 37, "H": 96, "I": 64, "E": 2, "packed": "int4", "group": 32},
        "whole tiles, a group per step",
    ),
    "asym_tiles": ({"T": 21, "H": 192, "I": 64, "E": 2, "packed": "int4_asym", "group": 32}, "codes minus their zeros"),
    "asym_groups": ({"T": 21, "H": 192, "I": 96, "E": 2, "packed": "int4_asym", "group": 96}, "groups of three steps"),
    "int8_tiles": ({"T": 21, "H": 72, "I": 40, "E": 2, "packed": "int8"}, "whole tiles, one scale per row"),
    "fp8_tiles": ({"T": 21, "H": 160, "I": 40, "E": 2, "packed": "fp8_block"}, "whole tiles, blocks of four steps"),
    "mxfp4_tiles": ({"T": 37, "H": 96, "I": 64, "E": 2, "packed": "mxfp4"}, "whole tiles, exponents added"),
    "int4_no_lora": (
        {"T": 33, "H": 16, "I": 16, "packed": "int4", "group": 16, "on": ()},
        "inference, base only",
    ),
    "usual": (
        {"T": 257, "H": 256, "I": 128, "E": 16, "k": 4, "r": 16},
        "several blocks per dimension, with tails",
    ),
}
_EVERY_PROBE = ("gpt_oss",)


def _tags(name: str, sizes: dict[str, object]) -> tuple[str, ...]:
    tags = {"every_probe": name in _EVERY_PROBE, "large": name == "usual", "storage": "packed" in sizes}
    return tuple(tag for tag, holds in tags.items() if holds)


CASES = [Case(name, inputs, sizes, why, _tags(name, sizes)) for name, (sizes, why) in SIZES.items()]
