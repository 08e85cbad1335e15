"""What `goldsmith.offload` needs of transformers: a model's experts into a store, an engine in their place, and back.

`goldsmith.offload.offload` and `from_pretrained` find this by name.
"""

from .attach import Attached
from .load import attach, load

__all__ = ["Attached", "attach", "load"]
