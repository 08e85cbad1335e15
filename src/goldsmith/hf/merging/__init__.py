"""An adapter merged into its base model, one layer in memory at a time."""

from .merge import merge

__all__ = ["merge"]
