"""LoRA adapters in peft's two files: reading one into a converted model, writing one from it."""
