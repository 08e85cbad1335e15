"""Shrinking: the smallest case that still fails in the same way."""
