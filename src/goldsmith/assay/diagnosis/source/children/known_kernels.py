"""known_kernels: rewrites a Triton kernel for the interpreter once, however often an unchanged copy is imported."""

from __future__ import annotations

from types import CodeType, FunctionType, ModuleType
from typing import Protocol

_REWRITE = "_goldsmith_known"


class _Rewriter(Protocol):
    fn: FunctionType


def reuse_rewritten(module: ModuleType) -> None:
    """Patches `triton.runtime.interpreter` for the rest of the process; leaves one with other internals alone.

    Rewriting reads, parses and compiles the kernel's text, a quarter of a small case's time.
    """
    rewriter = getattr(module, "FunctionRewriter", None)
    rewrite = getattr(rewriter, "rewrite_ast", None)
    if rewrite is None or hasattr(rewriter, _REWRITE):
        return
    known: dict[CodeType, CodeType] = {}

    def rewrite_ast(self: _Rewriter) -> FunctionType:
        own = self.fn
        code = known.get(own.__code__)
        if code is None:
            made = rewrite(self)
            if made is not own and isinstance(made, FunctionType) and made.__closure__ is None:
                known[own.__code__] = made.__code__
            return made
        for name, value in vars(module).items():
            own.__globals__.setdefault(name, value)
        copy = FunctionType(code, own.__globals__, own.__name__, own.__defaults__)
        copy.__kwdefaults__, copy.__annotations__ = own.__kwdefaults__, own.__annotations__
        return copy

    rewriter.rewrite_ast = rewrite_ast  # type: ignore[union-attr]
    setattr(rewriter, _REWRITE, known)
