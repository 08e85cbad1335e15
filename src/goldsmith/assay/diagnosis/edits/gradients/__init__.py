"""Edits of the backward's own operators: factors, slopes, sums in blocks, indices, choices, states of a loop."""
