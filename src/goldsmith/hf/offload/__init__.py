"""What `goldsmith.offload` needs of transformers: a model's experts into a store, an engine in their place, and back.

`goldsmith.offload.offload` and `from_pretrained` find this by name.
"""

from .attachment import Attached
from .loading import attach, load

__all__ = ["Attached", "attach", "load"]
