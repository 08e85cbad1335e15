"""Modules made of several operators, timed as a model calls them."""

from __future__ import annotations

from goldsmith.cli.bench.subject import ModuleSubject

from .connection import Connection
from .product_key_layers import PeerLayer, ProductKeyMemory

ALL: dict[str, type[ModuleSubject]] = {
    "mhc.connection": Connection,
    PeerLayer.kind: PeerLayer,
    ProductKeyMemory.kind: ProductKeyMemory,
}
