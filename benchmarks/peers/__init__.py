"""Peers of `goldsmith bench`, one small module each: NAME, `missing()` (why it cannot run, or None) and
`prepare(subject)` (a Variant, or None where it does not offer the operator)."""

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
