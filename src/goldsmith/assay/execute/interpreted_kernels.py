"""interpreted_kernels: runs compiled Triton kernels in Triton's interpreter while a candidate is checked on the CPU.

Triton decides when a kernel is defined whether it is compiled, and a user's module has been imported long before the
check. So the launch is redirected instead: the interpreter gets the same Python function, and `TRITON_INTERPRET` need
not be set.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from torch import Tensor

JIT, INTERPRETER, LANGUAGE = "triton.runtime.jit", "triton.runtime.interpreter", "triton.language"
TWIN = "_goldsmith_interpreted"  # attribute of a compiled kernel: the same function for the interpreter


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Context in which a compiled kernel runs in the interpreter, unless one of its arguments is on a GPU."""
    undo: list[Callable[[], None]] = []
    finder = _JitFinder(lambda jit: undo.append(_redirect(jit)))
    if JIT in sys.modules:
        _load_interpreter()
        undo.append(_redirect(sys.modules[JIT]))
    else:
        sys.meta_path.insert(0, finder)  # the candidate may import Triton when it runs
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        while undo:
            undo.pop()()


class _JitFinder:
    """Finds no module by itself, but calls `imported` once after Triton's module of compiled kernels is imported."""

    def __init__(self, imported: Callable[[ModuleType], None]) -> None:
        self.imported = imported

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != JIT:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.imported(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _redirect(jit: ModuleType) -> Callable[[], None]:
    """Redirects launches and returns a function that undoes it; leaves an unknown Triton, or a nested run's, alone."""
    kernel = getattr(jit, "JITFunction", None)
    if kernel is None or getattr(kernel.run, "func", None) is _run:
        return lambda: None
    changes = {"run": _Method(_run, kernel.run), "__call__": _call}
    before = {name: vars(kernel)[name] for name in changes}
    for name, change in changes.items():
        setattr(kernel, name, change)

    def undo() -> None:
        for name, method in before.items():
            setattr(kernel, name, method)

    return undo


class _Method(partial):
    """A partial that binds to an instance as a function does: the instance follows the stored arguments."""

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else partial(self, owner)


def _run(
    compiled: Callable[..., Any], kernel: Any, *args: object, grid: object, warmup: bool, **options: object
) -> Any:
    """A launch, in place of `JITFunction.run`."""
    if warmup or kernel.is_gluon() or any(map(_on_a_gpu, (*args, *options.values()))):
        return compiled(kernel, *args, grid=grid, warmup=warmup, **options)
    twin = _twin(kernel)
    twin.pre_run_hooks = kernel.pre_run_hooks
    with _interpreting(sys.modules[JIT].JITFunction):
        return twin.run(*args, grid=grid, warmup=False, **options)


def _call(kernel: Any, *args: object, **named: object) -> Any:
    """A call of a device function from a kernel, in place of `JITFunction.__call__`, which raises."""
    return _twin(kernel)(*args, **named)


def _bound(kernel: Any, owner: Any, kind: type | None = None) -> Any:
    """`x.sum` of a tensor in a kernel: Triton stores its device functions as attributes of the class."""
    return partial(kernel, owner) if isinstance(owner, sys.modules[LANGUAGE].tensor) else kernel


def _twin(kernel: Any) -> Any:
    attributes = vars(kernel)
    if TWIN not in attributes:
        attributes[TWIN] = importlib.import_module(INTERPRETER).InterpretedFunction(kernel.fn)
    return attributes[TWIN]


def _load_interpreter() -> None:
    """Import the interpreter before the run, so that the run's launches are counted and sped up."""
    with contextlib.suppress(ImportError):  # a launch says what is missing
        importlib.import_module(INTERPRETER)


@contextmanager
def _interpreting(kind: Any) -> Iterator[None]:
    """Context of a launch: Triton's own functions see TRITON_INTERPRET=1, and those of a tensor are its methods.

    Elsewhere they must not be: Python would take a class with `__get__` for one without a signature.
    """
    values = vars(sys.modules["triton"].knobs.runtime)
    before = dict(values)
    values["interpret"] = True
    outermost = "__get__" not in vars(kind)
    if outermost:
        kind.__get__ = _bound
    try:
        yield
    finally:
        if outermost:
            del kind.__get__
        values.clear()
        values.update(before)


def _on_a_gpu(argument: Any) -> bool:
    """Whether an argument is on a GPU: a tensor, one in a tuple, or the base of a descriptor."""
    if isinstance(argument, tuple | list):
        return any(map(_on_a_gpu, argument))
    base = getattr(argument, "base", argument)
    tensor = base if isinstance(base, Tensor) else argument
    return isinstance(tensor, Tensor) and tensor.is_cuda
