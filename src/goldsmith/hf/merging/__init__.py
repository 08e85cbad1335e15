"""An adapter merged into its base model, one layer in memory at a time."""
