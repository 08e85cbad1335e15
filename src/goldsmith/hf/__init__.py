"""goldsmith under transformers and peft: an experts implementation, packed experts with LoRA, adapters in peft's files.

Importing it registers "goldsmith" among transformers' experts implementations. Nothing of transformers is patched.
"""

try:
    import peft as _peft  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"goldsmith.hf needs transformers 5 and peft, and {error.name} is not installed: pip install goldsmith[hf]"
    ) from error

from .convert import convert
from .dispatch import register
from .load import load_adapter
from .report import trainable_report
from .save import save_adapter

register()

__all__ = ["convert", "load_adapter", "register", "save_adapter", "trainable_report"]
