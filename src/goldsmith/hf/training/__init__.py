"""LoRA fine-tuning, the package behind `goldsmith finetune`: data, the model, the run, and the files that it leaves.

A killed run resumes from its last checkpoint. Only the package `model` depends on the model's architecture.
"""
