"""The transformers side of `goldsmith.offload`: puts a model's experts into a store and an engine in their place.

`goldsmith.offload.offload` and `from_pretrained` import this package by name.
"""

from .attachment import Attached
from .loading import attach, load

__all__ = ["Attached", "attach", "load"]
