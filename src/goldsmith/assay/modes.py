"""What the assay's dispatch modes have in common: a check does not import torch's compiler."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """torch keeps its compiler from tracing `__torch_dispatch__`, and imports it for that: a second, in each process.

    As long as nothing else has imported it, nothing traces.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        plain = cls.__dict__.get("__torch_dispatch__")
        super().__init_subclass__(**kwargs)
        if plain is not None:
            cls.__torch_dispatch__ = _untraced(plain, cls.__torch_dispatch__)  # type: ignore[method-assign]


def _untraced(plain: Any, untraced: Any) -> Any:
    @functools.wraps(plain)
    def dispatch(self: Any, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return (untraced if "torch._dynamo" in sys.modules else plain)(self, func, types, args, kwargs)

    return dispatch
