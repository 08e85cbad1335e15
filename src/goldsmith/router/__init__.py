"""Cartesian-product routing to very many tiny experts: OmniMoE, PEER, product-key memory.

The mathematics is in README.md beside this file; each operator is a folder: what it is (op), what it means (reference),
how it is fast (_triton), on what it is tried (cases).
"""

from ._layers import RouterOutput
from ._strategy import choose_strategy
from .atomic_experts.op import atomic_experts
from .convert import (
    from_omnimoe,
    from_peer_pytorch,
    from_product_key_memory,
    to_omnimoe,
    to_peer_pytorch,
    to_product_key_memory,
)
from .load_balance import Usage, load_balance_loss, usage
from .modules import OmniMoE
from .peer import PEER
from .product_topk.op import product_topk

__all__ = [
    "PEER",
    "OmniMoE",
    "RouterOutput",
    "Usage",
    "atomic_experts",
    "choose_strategy",
    "from_omnimoe",
    "from_peer_pytorch",
    "from_product_key_memory",
    "load_balance_loss",
    "product_topk",
    "to_omnimoe",
    "to_peer_pytorch",
    "to_product_key_memory",
    "usage",
]
