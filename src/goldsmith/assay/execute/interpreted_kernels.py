"""interpreted_kernels: runs compiled Triton kernels in Triton's interpreter while a candidate is checked on the CPU.

Triton decides when a kernel is defined whether it is compiled, and a user's module has been imported long before the
check. So the launch is redirected instead: the interpreter gets the same Python function, and `TRITON_INTERPRET` need
not be set.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

JIT, INTERPRETER, VARIABLE = "triton.runtime.jit", "triton.runtime.interpreter", "TRITON_INTERPRET"
TWIN = "_goldsmith_interpreted"  # attribute of a compiled kernel: the same function for the interpreter
USED = ("InterpretedFunction", "GridExecutor", "tl")


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Context in which a compiled kernel runs in the interpreter, unless one of its arguments is on a GPU.

    If Triton is imported only inside the context, and there is no GPU, its kernels are defined for the interpreter.
    """
    jit = sys.modules.get(JIT)
    if jit is None:
        with _variable_set():
            yield
        return
    kernel = getattr(jit, "JITFunction", None)
    interpreter = _interpreter()
    if kernel is None or interpreter is None or getattr(kernel.run, "func", None) is _run:
        yield
        return
    changes = {
        "run": _Method(_run, interpreter, kernel.run),
        "__call__": _Method(_call, interpreter, kernel.__call__),
        "__get__": _Method(_bound, interpreter, None),
    }
    before = {name: vars(kernel)[name] for name in changes if name in vars(kernel)}
    for name, change in changes.items():
        setattr(kernel, name, change)
    try:
        yield
    finally:
        for name in changes:
            if name in before:
                setattr(kernel, name, before[name])
            else:
                delattr(kernel, name)


def _run(
    interpreter: ModuleType, compiled: Any, kernel: Any, *args: object, grid: object, warmup: bool, **options: object
) -> Any:
    """A launch, in place of `JITFunction.run`."""
    if warmup or kernel.is_gluon() or any(map(_on_a_gpu, (*args, *options.values()))):
        return compiled(kernel, *args, grid=grid, warmup=warmup, **options)
    twin = _twin(interpreter, kernel)
    twin.pre_run_hooks = kernel.pre_run_hooks
    with _interpreting():
        return twin.run(*args, grid=grid, warmup=False, **options)


def _call(interpreter: ModuleType, compiled: Any, kernel: Any, *args: object, **named: object) -> Any:
    """A call of a device function from a kernel, in place of `JITFunction.__call__`, which raises."""
    return _twin(interpreter, kernel)(*args, **named)


def _bound(interpreter: ModuleType, compiled: None, kernel: Any, owner: Any, kind: type | None = None) -> Any:
    """`x.sum` of a tensor in a kernel: Triton stores its device functions as attributes of the class."""
    return partial(kernel, owner) if isinstance(owner, interpreter.tl.tensor) else kernel


class _Method(partial):
    """A partial that binds to an instance as a function does: the instance follows the stored arguments."""

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else partial(self, owner)


def _twin(interpreter: ModuleType, kernel: Any) -> Any:
    attributes = vars(kernel)
    if TWIN not in attributes:
        attributes[TWIN] = interpreter.InterpretedFunction(kernel.fn)
    return attributes[TWIN]


def _interpreter() -> ModuleType | None:
    try:
        module = importlib.import_module(INTERPRETER)
    except ImportError:  # a Triton without an interpreter, or without numpy
        return None
    return module if all(hasattr(module, name) for name in USED) else None


@contextmanager
def _interpreting() -> Iterator[None]:
    """Context in which Triton's own functions see TRITON_INTERPRET=1."""
    values = vars(sys.modules["triton"].knobs.runtime)
    before = dict(values)
    values["interpret"] = True
    try:
        yield
    finally:
        values.clear()
        values.update(before)


@contextmanager
def _variable_set() -> Iterator[None]:
    """Context with TRITON_INTERPRET=1, if it is not set and there is no GPU."""
    if VARIABLE in os.environ or torch.cuda.is_available():
        yield
        return
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


def _on_a_gpu(argument: Any) -> bool:
    """Whether an argument is on a GPU: a tensor, one in a tuple, or the base of a descriptor."""
    if isinstance(argument, tuple | list):
        return any(map(_on_a_gpu, argument))
    base = getattr(argument, "base", argument)
    tensor = base if isinstance(base, Tensor) else argument
    return isinstance(tensor, Tensor) and tensor.is_cuda
