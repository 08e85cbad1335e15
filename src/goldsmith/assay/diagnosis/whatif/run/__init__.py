"""Runs of the golden: recorded, changed at one operator, or replayed from a recording."""
