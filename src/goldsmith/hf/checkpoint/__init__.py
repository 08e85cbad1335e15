"""Checkpoints in safetensors files, plain or quantised: their tensors, a model's experts, its other weights."""
