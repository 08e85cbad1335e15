"""Small layers of the family, and inputs for them."""

import torch

from goldsmith import router

D = 24
VARIANTS = {
    "omnimoe": {},
    "omnimoe_pairs": {"num_experts": (6, 8), "router_norm": "none", "intermediate_size": 0, "activation": "gelu"},
    "omnimoe_paper": {"router_norm": "batch", "log_softmax": True, "weights": "exp"},
    "peer": {},
    "peer_relu": {"weights": "relu", "separate_tables": True, "query_norm": "layer", "pre_norm": "rms"},
    "peer_memory": {"values_only": True, "query_norm": "batch", "pre_norm": "layer", "output_norm": True},
}
CAUSAL = [name for name in VARIANTS if "batch" not in str(VARIANTS[name])]


def layer(name, seed=0, **changed):
    """A layer by name, on the reference: a kernel in the interpreter would take a hundred times as long."""
    torch.manual_seed(seed)
    options = {"num_experts": 49, "backend": "reference"} | VARIANTS[name] | changed
    if name.startswith("omnimoe"):
        options = {"intermediate_size": 32, "k": 5} | options
        return router.OmniMoE(D, options.pop("num_experts"), options.pop("k"), **options)
    options = {"k": 3, "heads": 2} | options
    return router.PEER(D, options.pop("num_experts"), options.pop("k"), **options)


def tied(*shape, dtype=torch.float32):
    """Numbers on few levels, so that logits tie."""
    return torch.randint(-2, 3, shape).to(dtype) / 2
