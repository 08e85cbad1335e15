"""Cartesian-product routing to very many tiny experts: OmniMoE, PEER, product-key memory.

README.md in this folder has the mathematics. Each operator is a folder: declaration (op.py), plain torch
(reference.py), Triton (_triton.py) and test cases (cases.py).
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
