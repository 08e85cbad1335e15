"""GGUF files, read through the packages gguf and transformers: which file, its config, its tensors, its experts."""
