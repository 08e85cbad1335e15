"""Edits of single operators: pooling, convolutions, windows, outer products, interpolation, padded lanes."""
