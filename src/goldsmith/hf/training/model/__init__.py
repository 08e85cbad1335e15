"""The model to train: loading it, its device, LoRA outside the experts, the memory it takes."""
