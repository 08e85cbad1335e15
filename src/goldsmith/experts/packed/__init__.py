"""Packed weights of a layer's experts: formats, layout in memory, quantisation, importers and files."""

from .experts import PackedExperts, _restored  # pickles written by version 0.1 name goldsmith.experts.packed._restored

__all__ = ["PackedExperts", "_restored"]
