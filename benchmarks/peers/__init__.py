"""Peers: other ways to compute goldsmith's operators. Each is a `Peer` of goldsmith.cli.bench.subject."""

from __future__ import annotations

from goldsmith.cli.bench.subject import Peer

from . import compiled, eager, embedding_bag, gather, kt_kernel, liger, published, topk, topk_compiled, transformers

ALL: dict[str, Peer] = {
    module.NAME: module
    for module in (
        eager, compiled, liger, embedding_bag, gather, topk, topk_compiled, kt_kernel, *published.PEERS,
        *transformers.PEERS,
    )
}  # fmt: skip
