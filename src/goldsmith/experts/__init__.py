"""Mixture-of-experts layers with LoRA over a frozen, optionally quantised base: forward and backward.

README.md in this folder has the mathematics. Each operator is a folder with its declaration (op), its reference, its
backends and its test cases; `packed` holds the formats of quantised weights.
"""

from ._factors import LayerLora
from .linear.op import linear
from .lora import LoRA
from .modules import Experts, PackedLinear
from .moe.op import moe
from .packed.experts import PackedExperts
from .packed.importers import from_awq, from_codes, from_fp8_block, from_k2, from_mxfp4
from .packed.matrix import PackedMatrix, pack_matrix
from .packed.packing import pack
from .slots.op import slots

__all__ = [
    "Experts",
    "LayerLora",
    "LoRA",
    "PackedExperts",
    "PackedLinear",
    "PackedMatrix",
    "from_awq",
    "from_codes",
    "from_fp8_block",
    "from_k2",
    "from_mxfp4",
    "linear",
    "moe",
    "pack",
    "pack_matrix",
    "slots",
]
