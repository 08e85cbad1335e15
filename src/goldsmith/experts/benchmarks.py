"""Benchmark cases of experts.moe and experts.slots for `goldsmith bench`: layers of real models, in each format.

A few experts are drawn and repeated, each copy in its own memory. The values do not affect the time, and drawing and
packing a whole layer takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..assay.declare.case import Case, Make
from ..core.bench import BenchCase
from ._conventions import FACTORS, SLOT_NAMES
from .packed.formats import FORMATS
from .packed.layout import Layout
from .packed.memory import empty_pages
from .packed.packing import pack
from .packed.quantisation import check_group

DRAWN = 2  # experts drawn at random; the others are copies
SLOT_OPTIONS = ("layout", "gate_scale", "up_scale", "down_scale", "activation", "alpha", "limit")
LAYERS = {
    "v2-lite": {"H": 2048, "I": 1408, "E": 64, "k": 6},  # a layer of DeepSeek-V2-Lite
    "qwen3": {"H": 2048, "I": 768, "E": 128, "k": 8},  # of Qwen3-30B-A3B
    "v3-32": {"H": 7168, "I": 2048, "E": 32, "k": 8},  # of DeepSeek-V3, 32 of its 256 experts
    "small": {"H": 1024, "I": 512, "E": 64, "k": 8},
    "tiny": {"H": 64, "I": 64, "E": 4, "k": 2},
}
FORMATS_TIMED = ("bf16", "int4", "", "int8", "mxfp4", "fp8_block")  # "": plain tensors in bfloat16
WHY = (
    "weights and LoRA factors of every active expert once, x, y, dy, dx, g and u once; a route's products: 6HI forward "
    "and for dx, LoRA 6r(H+I) forward and 12r(H+I) backward"
)


def inputs(
    make: Make, T: int, H: int, I: int, E: int, k: int, r: int, packed: str, rotated: bool = False
) -> dict[str, object]:
    """Arguments of experts.moe. packed "": plain tensors; rotated: topk_ids of several calls that share no expert."""
    kind: Callable[..., Make] = type(make)
    gate_up, down, layout = _base(kind, make.dtype, str(make.device), E, H, I, packed)
    arguments: dict[str, object] = dict.fromkeys(("gate_up_bias", "down_bias", "seed", *FACTORS))
    for name, out, width in (("gate", I, H), ("up", I, H), ("down", H, I)) if r else ():
        arguments[f"{name}_a"] = make.normal(E, r, width, std=width**-0.5)
        arguments[f"{name}_b"] = make.normal(E, out, r, std=0.1)
    if rotated:
        order = make.permutation(E)
        ids = torch.stack([order[turn * T * k :][: T * k].view(T, k) for turn in range(max(1, E // (T * k)))])
    else:
        ids = make.uniform(T, E, dtype=torch.float32).topk(k).indices
    return arguments | {
        "x": make.normal(T, H),
        "topk_ids": ids,
        "topk_weights": make.uniform(T, k, dtype=torch.float32),
        "gate_up": gate_up,
        "down": down,
        "layout": layout,
        **dict.fromkeys(("gate_scale", "up_scale", "down_scale"), 2.0),
        "dropout": 0.0,
        "activation": "silu",
        "alpha": 1.702,
        "limit": None,
        "save": bool(r),
    }


def int8_inputs(make: Make, **sizes: Any) -> dict[str, object]:
    return {name: value for name, value in inputs(make, **sizes).items() if name != "save"}


def slot_inputs(make: Make, **sizes: Any) -> dict[str, object]:
    drawn = inputs(make, **sizes)
    return {name: drawn[name] for name in (*SLOT_NAMES, *SLOT_OPTIONS)}


@lru_cache(maxsize=1)  # the cases of a layer in a format follow one another
def _base(
    kind: Callable[..., Make], dtype: torch.dtype, device: str, E: int, H: int, I: int, packed: str
) -> tuple[Tensor, Tensor, str]:
    make = kind(dtype, device, 0)
    few = min(E, DRAWN)
    gate_up, down = make.normal(few, 2 * I, H, std=H**-0.5), make.normal(few, H, I, std=I**-0.5)
    if not packed:
        return _repeated(gate_up, E), _repeated(down, E), ""
    base = pack(gate_up.float(), down.float(), format=packed)
    layout = replace(base.layout, num_experts=E)
    blobs = []
    for name, blob in (("gate_up", base.gate_up), ("down", base.down)):
        (place,) = layout.matrices(name)
        whole = empty_pages(layout.nbytes(name))  # the same kind of memory as a packed base
        experts = blob[place.offset :][: few * place.expert_stride].view(few, -1)
        whole[place.offset :][: E * place.expert_stride].view(E, -1).copy_(_repeated(experts, E))
        blobs.append(whole.to(device))
    return blobs[0], blobs[1], layout.text


def _repeated(few: Tensor, count: int) -> Tensor:
    return few.repeat(-(-count // len(few)), *(1,) * (few.dim() - 1))[:count].contiguous()


def _entry(
    name: str, T: int, layer: str, packed: str, r: int, *, train: bool, on_cpu: bool, slots: bool = False
) -> BenchCase:
    sizes: dict[str, object] = {"T": T, **LAYERS[layer], "r": r, "packed": packed}
    H, I, E, k = (LAYERS[layer][axis] for axis in "HIEk")
    rotated = T == 1
    case = Case(name, slot_inputs if slots else inputs, sizes | {"rotated": rotated}, WHY)
    active = k * T if rotated else E * (1 - (1 - k / E) ** T)  # expected number with uniform routing
    read = active * (_expert_bytes(H, I, packed) + (12 if train else 6) * r * (H + I))
    routes, saved = T * k, 4 * T * k * I if train else 0
    forward = round(read + 4 * T * H + 12 * routes + saved)
    backward = round(read + 6 * T * H + 16 * routes + saved) if train else None
    return BenchCase(
        name, sizes, torch.bfloat16, case.build, forward, backward, WHY, FACTORS if r else (),
        forward_flop=routes * (6 * H * I + 6 * r * (H + I)),
        backward_flop=routes * (6 * H * I + 12 * r * (H + I)) if train else None,
        rotated=("topk_ids",) if rotated else (), on_cpu=on_cpu,
    )  # fmt: skip


def _expert_bytes(H: int, I: int, packed: str) -> int:
    if not packed:
        return 6 * H * I
    kind = FORMATS[packed]
    scales = kind.scales[0] if kind.scales else None
    layout = Layout(packed, 1, H, I, check_group("bench", kind, None, H, I), scales, (0, I))
    return layout.nbytes("gate_up") + layout.nbytes("down")


def _moe(layer: str, formats: Sequence[str], tokens: Sequence[int], *, on_cpu: bool = False) -> list[BenchCase]:
    """Decoding of one token without LoRA; training with rank 8 for the other numbers of tokens."""
    entries = []
    for packed in formats:
        label = packed or "plain"
        for T in tokens:
            decode, r = T == 1, 0 if T == 1 else 8
            name = f"decode[{layer},{label}]" if decode else f"train[{layer},T={T},{label}]"
            entries.append(_entry(name, T, layer, packed, r, train=not decode, on_cpu=on_cpu))
    return entries


def _ranked(layer: str, formats: Sequence[str], ranks: Sequence[int]) -> list[BenchCase]:
    """Training of 256 tokens at these ranks; rank 0 is the base with dx, the baseline for LoRA."""
    runs = [(packed, r, f"train[{layer},T=256,{packed},r={r}]") for packed in formats for r in ranks]
    return [_entry(name, 256, layer, packed, r, train=True, on_cpu=False) for packed, r, name in runs]


MOE = [
    *_moe("tiny", ["bf16"], [1], on_cpu=True),
    *_moe("small", FORMATS_TIMED, [1, 256], on_cpu=True),
    *_moe("v2-lite", FORMATS_TIMED, [1, 256, 2048]),
    *_moe("qwen3", ("bf16", "int4"), [1, 256, 1024]),
    *_moe("qwen3", ("",), [128, 256, 512, 1024, 2048, 4096]),  # plain tensors, which a GPU needs
    *_moe("v3-32", ("bf16", "int4"), [1, 64, 1024, 4096]),
    *_ranked("small", ("bf16", "int4", "mxfp4"), (0, 16)),
    *_ranked("v2-lite", ("bf16", "int4"), (0, 16)),
]
INT8 = [  # prompts: 8-bit products are for inference
    replace(
        _entry(f"decode[{layer},T=256,{packed}]", 256, layer, packed, 0, train=False, on_cpu=layer == "small"),
        build=Case("prompt", int8_inputs, {"T": 256, **LAYERS[layer], "r": 0, "packed": packed}, WHY).build,
        products=("vnni", "amx_int8"),
    )
    for layer in ("small", "v2-lite")
    for packed in ("int8", "int4")
]
SLOTS = [
    _entry(f"decode[{layer},{packed}]", 1, layer, packed, 0, train=False, on_cpu=layer == "small", slots=True)
    for layer in ("small", "v2-lite")
    for packed in ("bf16", "int4")
]
