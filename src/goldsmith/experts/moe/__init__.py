"""experts.moe: the experts of a mixture, with LoRA, forward and backward."""
