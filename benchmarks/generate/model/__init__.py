"""The model that every engine runs: its sizes, its weights, and its file."""
