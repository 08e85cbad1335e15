"""`goldsmith finetune`: LoRA on the experts of a mixture-of-experts model."""
