"""Experiments: further runs of the candidate, each of which adds facts."""
