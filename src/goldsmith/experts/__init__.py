"""MoE experts with LoRA over a frozen, also quantised, base: forward and backward.

The mathematics is in README.md beside this file; each operator is a folder: what it is (op), what it means (reference),
how it is fast, on what it is tried (cases).
"""

from .lora import LoRA
from .modules import Experts
from .moe.op import moe
from .packed.experts import PackedExperts
from .packed.importers import from_awq, from_fp8_block, from_k2, from_mxfp4
from .packed.packing import pack
from .slots.op import slots

__all__ = [
    "Experts",
    "LoRA",
    "PackedExperts",
    "from_awq",
    "from_fp8_block",
    "from_k2",
    "from_mxfp4",
    "moe",
    "pack",
    "slots",
]
