"""experts.slots: test cases, drawn like those of experts.moe and mostly the same."""

from __future__ import annotations

from typing import Any

from ...assay.declare.case import Case, Make
from .._conventions import SLOT_NAMES
from ..benchmarks import SLOTS as BENCH
from ..moe.cases import DTYPES, SIZES
from ..moe.cases import inputs as moe_inputs

__all__ = ["BENCH", "CASES", "DTYPES", "STORED", "inputs"]

STORED = {"native": {"g": "x", "u": "x", "h": "x"}}
_OPTIONS = ("layout", "gate_scale", "up_scale", "down_scale", "activation", "alpha", "limit")


def inputs(make: Make, **sizes: Any) -> dict[str, object]:
    """Arguments of experts.slots, drawn as for experts.moe with the same sizes."""
    drawn = moe_inputs(make, **sizes)
    return {name: drawn[name] for name in (*SLOT_NAMES, *_OPTIONS)}


_NAMES = (
    *("no_tokens", "one_token", "gpt_oss", "holes", "nothing", "no_slots", "twice", "leading_dimensions"),
    *("strided", "bf16_slices", "int8", "int4_slices", "mxfp4"),
)
_EVERY_PROBE = ("holes",)

CASES = [
    Case(name, inputs, SIZES[name][0], SIZES[name][1], ("every_probe",) * (name in _EVERY_PROBE)) for name in _NAMES
]
