"""Causes: rules over facts, the learned probability of each cause, and their ranking."""
