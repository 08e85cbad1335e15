"""Peers of `goldsmith bench`, one small module each: NAME, `missing()` (why it cannot run, or None) and
`prepare(subject)` (a Variant, or None where it does not offer the operator)."""

from __future__ import annotations

from types import ModuleType

from . import compiled, eager, embedding_bag, liger, published, topk

_MODULES = (eager, compiled, liger, embedding_bag, topk, *published.PEERS)
ALL: dict[str, ModuleType] = {module.NAME: module for module in _MODULES}
