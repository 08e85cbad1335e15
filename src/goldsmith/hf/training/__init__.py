"""LoRA fine-tuning: data, packing, the loop, checkpoints that a killed run goes on from, the log and its page.

`goldsmith finetune` is this package with a command line. Nothing here asks what the model is, except `model`.
"""
