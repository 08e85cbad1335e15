"""goldsmith for transformers and peft: an experts implementation, packed experts with LoRA, adapters in peft's files.

Importing it registers the experts implementation "goldsmith" in transformers. Nothing in transformers is patched.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

# peft is imported only inside the functions that use it, because its import takes seconds
if _missing := [name for name in ("transformers", "peft") if find_spec(name) is None]:
    raise ImportError(
        f"goldsmith.hf needs transformers 5 and peft, and {_missing[0]} is not installed: "
        "pip install 'transformers>=5' peft"
    )

from .adapter.exporting import export_adapter
from .adapter.loading import load_adapter
from .adapter.saving import save_adapter
from .convert import convert
from .dispatch import register
from .hyper_connections.applying import apply
from .merging.merged_model import merge
from .parameter_counts import trainable_report

if TYPE_CHECKING:
    from .watch_callback import WatchCallback

register()

__all__ = [
    "WatchCallback", "apply", "convert", "export_adapter", "load_adapter", "merge", "register", "save_adapter",
    "trainable_report",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "WatchCallback":  # loaded when it is used: transformers' Trainer takes 1.5 s to import
        from .watch_callback import WatchCallback

        return WatchCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
