"""interpreted_kernels: runs compiled Triton kernels in Triton's interpreter while a candidate is checked on the CPU.

Triton decides when a kernel is defined whether it is compiled, and a user's module has been imported long before the
check. So the launch is redirected instead: the interpreter gets the same Python function, and `TRITON_INTERPRET` need
not be set. Its kernels get floats as compiled ones do, in float32 and as values of the language, and functions of
libdevice compute what torch's function of the same name computes.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

JIT, INTERPRETER, LANGUAGE = "triton.runtime.jit", "triton.runtime.interpreter", "triton.language"
AUTOTUNER = "triton.runtime.autotuner"
LIBDEVICE = "triton.language.extra.libdevice"
Change = Callable[[ModuleType], Callable[[], None]]  # changes a module and returns what undoes it
TWIN = "_goldsmith_interpreted"  # attribute of a compiled kernel: the same function for the interpreter


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Context in which a compiled kernel runs in the interpreter, unless one of its arguments is on a GPU."""
    undo: list[Callable[[], None]] = []
    if JIT in sys.modules:
        _load_interpreter()
    finder = _Finder({name: change for name, change in _CHANGES.items() if name not in sys.modules}, undo)
    undo += [change(sys.modules[name]) for name, change in _CHANGES.items() if name in sys.modules]
    sys.meta_path.insert(0, finder)  # the candidate may import Triton when it runs
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        while undo:
            undo.pop()()


class _Finder:
    """Finds no module by itself, but changes Triton's modules once they are imported, and keeps how to undo it."""

    def __init__(self, changes: Mapping[str, Change], undo: list[Callable[[], None]]) -> None:
        self.changes, self.undo = changes, undo

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.changes:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.undo.append(self.changes[name](module))

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


def _convert_floats(interpreter: Any) -> Callable[[], None]:
    """Passes floats as float32 values of the language, and returns a function that undoes it.

    The interpreter converts integers only. A float would keep its digits beyond float32, and have no methods.
    """
    convert = getattr(interpreter, "_implicit_cvt", None)
    if convert is None or getattr(convert, "func", None) is _converted:
        return lambda: None
    interpreter._implicit_cvt = partial(_converted, interpreter, convert)

    def undo() -> None:
        interpreter._implicit_cvt = convert

    return undo


def _converted(interpreter: Any, convert: Callable[[object], object], argument: object) -> Any:
    if not isinstance(argument, float):
        return convert(argument)
    kind = interpreter.tl.float32
    number = interpreter.np.array([argument], dtype=interpreter.np.float32)
    return interpreter.tl.tensor(interpreter.TensorHandle(number, kind), kind)


def _fill_stubs(libdevice: ModuleType) -> Callable[[], None]:
    """Gives libdevice's functions a body, and returns a function that undoes it.

    They are stubs, for which the compiler takes a GPU's functions. Kernels hold the stubs themselves, under any name.
    """
    stubs = [f for f in vars(libdevice).values() if isinstance(f, FunctionType) and f.__code__ is not _STUB]
    before = [(f, f.__code__, f.__kwdefaults__) for f in stubs]
    for stub in stubs:
        stub.__code__, stub.__kwdefaults__ = _STUB, {"computed": partial(_computed, stub.__name__)}

    def undo() -> None:
        for stub, code, defaults in before:
            stub.__code__, stub.__kwdefaults__ = code, defaults

    return undo


_STUB = (lambda *arguments, computed: computed(*arguments)).__code__


def _computed(name: str, *arguments: object) -> object:
    """A function of libdevice in the interpreter."""
    function, interpreter = getattr(torch, name, None), sys.modules[INTERPRETER]
    if function is None:
        raise NotImplementedError(f"Triton's interpreter cannot compute libdevice's {name}; check the kernel on a GPU")
    language, core = interpreter.tl, interpreter.tl.core
    values = [_converted(interpreter, interpreter._implicit_cvt, core._unwrap_if_constexpr(a)) for a in arguments]
    numbers = [torch.from_numpy(v.handle.data.copy()) for v in values]  # a scan in reverse has negative strides
    result = function(*numbers)
    kind = language.int32 if result.dtype == torch.bool else values[0].dtype
    data = result.to(torch.int32 if result.dtype == torch.bool else result.dtype).numpy()
    shape = kind if not any(v.type.is_block() for v in values) else language.block_type(kind, list(data.shape))
    return core.tensor(interpreter.TensorHandle(data, kind), shape)


def _take_first(autotuner: ModuleType) -> Callable[[], None]:
    """Makes all configurations equally fast, and returns a function that undoes it: the first one then runs.

    Triton would time them, which needs a GPU.
    """
    tuned = getattr(autotuner, "Autotuner", None)
    if tuned is None or not hasattr(tuned, "_bench") or getattr(tuned._bench, "func", None) is _untimed:
        return lambda: None
    before = tuned._bench
    tuned._bench = _Method(_untimed, before)

    def undo() -> None:
        tuned._bench = before

    return undo


def _untimed(timed: Callable[..., Any], kernel: Any, *args: object, **options: object) -> Any:
    """The times of a configuration, in place of `Autotuner._bench`."""
    return timed(kernel, *args, **options) if any(map(_on_a_gpu, (*args, *options.values()))) else [0.0]


_CHANGES: dict[str, Change] = {
    JIT: _redirect, INTERPRETER: _convert_floats, LIBDEVICE: _fill_stubs, AUTOTUNER: _take_first,
}  # fmt: skip


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
