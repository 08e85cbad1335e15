"""Quantised checkpoints: one module for each way to store a linear layer, and how they become codes of our formats."""
