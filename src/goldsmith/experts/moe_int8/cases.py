"""experts.moe_int8: test cases, drawn like those of experts.moe."""

from __future__ import annotations

from typing import Any

from ...assay.declare.case import Case, Make
from .._conventions import NAMES
from ..benchmarks import INT8 as BENCH
from ..moe.cases import DTYPES
from ..moe.cases import inputs as moe_inputs

__all__ = ["BENCH", "CASES", "DTYPES", "STORED", "inputs"]

STORED = {"native": {"g": "x", "u": "x", "h": "x"}}
_OPTIONS = (
    *("layout", "gate_scale", "up_scale", "down_scale", "dropout"),
    *("activation", "alpha", "limit"),
)


def inputs(make: Make, **sizes: Any) -> dict[str, object]:
    """Arguments of experts.moe_int8, drawn as for experts.moe with the same sizes."""
    drawn = moe_inputs(make, **sizes)
    return {name: drawn[name] for name in (*NAMES, *_OPTIONS)}


_INT4 = {"H": 24, "I": 16, "packed": "int4", "group": 8, "on": ()}

SIZES: dict[str, tuple[dict[str, object], str]] = {
    "no_tokens": ({"T": 0} | _INT4, "empty output"),
    "one_token": ({"T": 1} | _INT4, "decoding; eight weights per word, one scale per 8 inputs"),
    "rows": ({"T": 5, "H": 33, "I": 17, "packed": "int8", "on": ()}, "one scale per row, odd sizes"),
    "rows_in_slices": (
        {"T": 5, "H": 9, "I": 7, "packed": "int8", "partitions": 3, "bias": True, "on": ()},
        "slices also share the scales of h",
    ),
    "long_rows": ({"T": 3, "H": 600, "I": 300, "packed": "int8", "on": ()}, "sums carry over from part to part"),
    "groups": ({"T": 5, "H": 72, "I": 48, "packed": "int8", "group": 24, "on": ()}, "group size is not a power of 2"),
    "wide_groups": (
        {"T": 3, "H": 640, "I": 320, "packed": "int4", "group": 320, "on": ()},
        "a group of 4-bit codes is longer than a part",
    ),
    "slices": (
        {"T": 7, "H": 16, "I": 40, "packed": "int4", "group": 8, "partitions": 3, "kind": "holes", "k": 3},
        "slices of 2, 2 and 1 groups; -1 is skipped",
    ),
    "zeros": (
        {"T": 5, "H": 24, "I": 16, "packed": "int4_asym", "group": 8, "partitions": 2, "on": ()},
        "one zero per group",
    ),
    "gpt_oss": (
        _INT4 | {"T": 3, "bias": True, "activation": "swiglu_oai", "limit": 1.0, "on": ("gate", "up", "down")},
        "clamped on both sides, with biases and LoRA",
    ),
    "nothing": ({"T": 4, "kind": "none"} | _INT4, "every id -1: zeros everywhere"),
    "many_tokens": (
        {"T": 70, "H": 64, "I": 40, "E": 2, "k": 2, "packed": "int8", "group": 8, "on": ()},
        "an expert has more routes than a block has rows",
    ),
}
_EVERY_PROBE, _PROVED = ("gpt_oss",), ("no_tokens", "one_token", "rows_in_slices", "zeros", "gpt_oss")


def _tags(name: str) -> tuple[str, ...]:
    tags = {"every_probe": name in _EVERY_PROBE, "storage": name not in _PROVED}
    return tuple(tag for tag, holds in tags.items() if holds)


CASES = [Case(name, inputs, sizes, why, _tags(name)) for name, (sizes, why) in SIZES.items()]
