"""The published layers of PEER-pytorch and product-key-memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from goldsmith.cli.bench.subject import Subject, Variant

from ..modules.product_key_layers import PeerLayer, layer


def _peer(ours: Any) -> Any:
    """The published module with our module's weights, and the table that looks its experts up."""
    from PEER_pytorch import PEER

    from goldsmith.router import to_peer_pytorch

    with torch.device("meta"):
        theirs = PEER(
            ours.hidden_size, heads=ours.heads, num_experts=ours.size**2, num_experts_per_head=ours.k,
            dim_key=ours.key_dim, non_competing_scores=False,
        )  # fmt: skip
    theirs.load_state_dict(to_peer_pytorch(ours), assign=True)
    return theirs, theirs.weight_up_embed


def _memory(ours: Any) -> Any:
    from product_key_memory import PKM

    from goldsmith.router import to_product_key_memory

    with torch.device("meta"):
        theirs = PKM(ours.hidden_size, heads=ours.heads, num_keys=ours.size, topk=ours.k, dim_head=ours.key_dim)
    theirs.load_state_dict(to_product_key_memory(ours), assign=True)
    return theirs, theirs.values


def _published(name: str, package: str, kind: str, build: Callable[..., Any]) -> Any:
    def missing() -> str | None:
        return None if importlib.util.find_spec(package) else f"{name} is not installed"

    def prepare(subject: Subject) -> Variant | None:
        if not isinstance(subject, PeerLayer) or subject.kind != kind:
            return None
        ours = layer(subject.drawn, "reference", **subject.options)
        theirs, table = build(ours)
        h = subject.fresh_leaves()["h"]
        leaves = [h, *theirs.parameters()]
        note = f"{_others(ours, theirs, table, subject.arguments['h'])} of its selections are not ours"
        return Variant(name, lambda: theirs(h), leaves, note=note)

    return SimpleNamespace(NAME=name, missing=missing, prepare=prepare)


@torch.no_grad()
def _others(module: Any, theirs: Any, table: Any, h: Tensor) -> str:
    """The share of experts that the published layer selects for a token and ours does not."""
    seen: list[Tensor] = []
    handle = table.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    theirs(h)
    handle.remove()
    ours = module(h, return_router=True)[1].indices.reshape(h.shape[:-1].numel(), module.heads, module.k)
    theirs_selected = seen[0].reshape(ours.shape).sort(-1).values
    return f"{(theirs_selected != ours.sort(-1).values).double().mean().item():.2g}"


PEERS: tuple[ModuleType, ...] = (
    _published("peer-pytorch", "PEER_pytorch", "router.peer", _peer),
    _published("product-key-memory", "product_key_memory", "router.memory", _memory),
)
