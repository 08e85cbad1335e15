"""The model to train: loading it, its device, what gets LoRA beside the experts, the memory it takes."""
