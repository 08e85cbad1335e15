"""DispatchMode: the base class of the assay's dispatch modes. It avoids the cost of torch's compiler outside traces."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_traced_by = torch._C._dynamo.eval_frame.get_eval_frame_callback  # None: nothing traces this thread


class DispatchMode(TorchDispatchMode):
    """A TorchDispatchMode that keeps torch's compiler out only while something is being traced.

    torch itself protects every `__torch_dispatch__` from its compiler, and imports the compiler for that: 1 s a
    process.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        plain = cls.__dict__.get("__torch_dispatch__")
        super().__init_subclass__(**kwargs)
        if plain is not None:
            cls.__torch_dispatch__ = _untraced(plain, cls.__torch_dispatch__)  # type: ignore[method-assign]


def _untraced(plain: Any, untraced: Any) -> Any:
    @functools.wraps(plain)
    def __torch_dispatch__(
        self: object, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        return (plain if _traced_by() is None else untraced)(self, func, types, args, kwargs)

    return __torch_dispatch__
