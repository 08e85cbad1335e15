"""Work: the number of elements that torch's operators read and write in a run."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ....support.dispatch_mode import DispatchMode


class CountedWork(DispatchMode):
    """Counts elements while it is active. Views count nothing, and the work of C and Triton kernels is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [t for t in tree_leaves((args, kwargs or {}, out)) if isinstance(t, Tensor)]
            self.elements += sum(t.numel() for t in tensors)
        return out
