"""ProcessState: what all code of a process shares besides functions and torch's settings, and whether calls change it.

Settings that change neither a number nor what other code does, such as how torch prints, are not looked at.
"""

from __future__ import annotations

import atexit
import copyreg
import ctypes
import decimal
import functools
import gc
import locale
import logging
import os
import re
import resource
import signal
import socket
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..support.deadline import WRITE_STACK
from .shared_generators import SharedGenerators

# prefixes of variables that compilers and their runtimes read when they start
_TOOLS = ("CC", "CXX", "CUDA", "GOMP_", "KMP_", "MAX_JOBS", "MKL_", "NV", "OMP_", "PYTORCH_", "TORCH", "TRITON_")
_SIGNALS = sorted(signal.valid_signals() - {WRITE_STACK})  # the harness's own
_UMASK = 0o077
_PACKAGES = (b"/site-packages/", b"/dist-packages/")
_GETTER = re.compile("^_?(is|get)_")  # functions that read a flag
_LIMITS = {number: name for name, number in sorted(vars(resource).items(), reverse=True) if name.startswith("RLIMIT_")}
_SMALL = 2.0**-60  # beside 1 it is rounded away to the nearest number, and in no other rounding mode
_TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")
# parts of names of torch's flags that change no number, or that others look at
_SELDOM_THE_SAME = ("deterministic", "thread_name", "_threads", "anomaly", "grad_enabled")


class ProcessState:
    """Compared with the state before the first call of the candidate."""

    def __init__(self) -> None:
        self.before: dict[str, object] = {}
        self.generators = SharedGenerators()

    def keep(self) -> None:
        """Before the first call, and after the candidate's import, which may set what it likes."""
        self.before = dict(_read())

    def begin(self) -> None:
        """Before a call: gives Python's and NumPy's generators states that they never had."""
        if not self.before:
            self.keep()
        self.generators.begin()

    def changed(self) -> list[str]:
        """After a call: sentences about what has changed."""
        sentences = []
        for name, now in _read():
            if name in self.before and now != self.before[name]:
                sentences.append(_change(name, self.before[name], now))
            if isinstance(now, _UnlessImported):
                self.before[name] = now
        return sentences + self.generators.seeded()


@dataclass(frozen=True)
class _UnlessImported:
    """What a module that is imported meanwhile may change, such as a list of functions that Python calls at its end."""

    value: object
    modules: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _UnlessImported) and (self.value == other.value or self.modules != other.modules)


@dataclass(frozen=True)
class _SignalHandler:
    """Of one signal. A package may set its own: LLVM does in Triton's first compilation, to remove its files."""

    value: object
    of_a_package: bool

    def __eq__(self, other: object) -> bool:
        return self.of_a_package or isinstance(other, _SignalHandler) and self.value == other.value


def _read() -> Iterator[tuple[str, object]]:
    """(what, value) of all that is looked at."""
    with suppress(OSError):  # the folder was removed
        yield "the working folder", os.getcwd()
    yield "the environment", {n: v for n, v in os.environ.items() if not n.startswith(_TOOLS)}
    caught, ignored = _kernel_masks()
    for number in _SIGNALS:
        name, bit = signal.Signals(number).name if number < 32 else str(number), 1 << number - 1
        known = signal.getsignal(number), caught & bit, ignored & bit
        yield f"the handler of {name}", _SignalHandler(known, bool(caught & bit) and _handled_by_a_package(number))
    yield "the set of blocked signals", signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for timer in _TIMERS:
        yield f"the timer {timer}", signal.getitimer(getattr(signal, timer)) != (0.0, 0.0)
    mask = os.umask(_UMASK)
    os.umask(mask)
    yield "the mask of file modes", mask
    if hasattr(os, "sched_getaffinity"):
        yield "the set of processors", os.sched_getaffinity(0)
    yield "the rounding of floating-point numbers", (1.0 + _SMALL, 1.0 - _SMALL, -1.0 - _SMALL)
    yield "Python's recursion limit", sys.getrecursionlimit()
    yield "Python's time between switches of threads", round(1e6 * sys.getswitchinterval())
    yield "Python's limit on digits of integers", sys.get_int_max_str_digits()
    yield "Python's garbage collection", (gc.isenabled(), gc.get_threshold(), list(map(id, gc.callbacks)))
    for number, name in _LIMITS.items():
        yield f"the limit {name}", resource.getrlimit(number)
    yield "the priority of the process", os.getpriority(os.PRIO_PROCESS, 0)
    stack = threading.stack_size()  # a question that sets it to 0
    threading.stack_size(stack)
    yield "the stack size of new threads", stack
    yield "the locale", locale.setlocale(locale.LC_ALL)
    yield "the time after which sockets give up", socket.getdefaulttimeout()
    context = decimal.getcontext()
    yield "the context of decimal numbers", (context.prec, context.rounding, context.Emin, context.Emax)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        yield f"sys.{name}", id(getattr(sys, name))
        yield f"the file descriptor {descriptor}", _file_of(descriptor)
    for name, value in (
        ("the list of functions that Python calls at its end", atexit._ncallbacks()),
        ("the list of filters of warnings", tuple(warnings.filters)),
        ("the list of folders of sys.path", tuple(sys.path)),
        ("copyreg's table of functions that pickle", dict(copyreg.dispatch_table)),
    ):
        yield name, _UnlessImported(value, len(sys.modules))
    yield "threading's trace function", threading.gettrace()
    yield "threading's profile function", threading.getprofile()
    yield "the level below which nothing is logged", logging.root.manager.disable
    yield "sys.meta_path", [id(f) for f in sys.meta_path if not _of_a_library(f)]
    numpy: Any = sys.modules.get("numpy")
    if hasattr(numpy, "geterr"):
        yield "NumPy's treatment of errors", {**numpy.geterr(), "call": numpy.geterrcall()}
    yield "torch's inference mode", torch.is_inference_mode_enabled()
    yield "torch's precision of float32 products", torch.get_float32_matmul_precision()
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if hooks is not None:
        yield "autograd's list of hooks for saved tensors", hooks(False)
    for name, flag in _flags():
        with suppress(AttributeError, RuntimeError):  # torch refuses to read the old flag where the new one is set
            yield name, flag()


def _kernel_masks() -> tuple[int, int]:
    """(caught, ignored) signals as the kernel knows them, because C can set handlers, too; a bit for each."""
    with suppress(OSError), open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
        return int(lines["SigCgt"], 16), int(lines["SigIgn"], 16)
    return 0, 0


class _Symbol(ctypes.Structure):
    """Dl_info: what dladdr(3) says of an address."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    )


def _handled_by_a_package(number: int) -> bool:
    """Whether a signal's handler is a function in a library of an installed package; Python does not know of those."""
    libc, action, symbol = (
        ctypes.CDLL(None),
        (ctypes.c_void_p * 32)(),
        _Symbol(),
    )  # sigaction's first field: the handler
    if libc.sigaction(number, None, action) or not libc.dladdr(ctypes.c_void_p(action[0]), ctypes.byref(symbol)):
        return False
    return any(folder in symbol.file for folder in _PACKAGES)


def _file_of(descriptor: int) -> object:
    try:
        known = os.fstat(descriptor)
    except OSError:
        return None
    return known.st_dev, known.st_ino


@functools.cache
def _flags() -> list[tuple[str, Callable[[], object]]]:
    """(name, how to read it) of torch's flags: what functions of torch._C return, and values of torch.backends.

    Only what can be set is read: `_get_accelerator` looks for a GPU, after which no forked process can use it.
    """
    flags: list[tuple[str, Callable[[], object]]] = []
    known = vars(torch._C)
    for name, get in known.items():
        flag = _GETTER.sub("", name)
        settable = {f"_set_{flag}", f"set_{flag}"} & known.keys() or flag.endswith("_enabled")
        if flag != name and settable and callable(get) and not any(part in flag for part in _SELDOM_THE_SAME):
            with suppress(Exception), warnings.catch_warnings():  # it takes arguments, or this build of torch lacks it
                warnings.simplefilter("error")
                if isinstance(get(), bool | int) and get() == get():
                    flags.append((f"torch's flag {flag}", get))
    for device in ("cpu", "cuda"):
        flags.append((f"torch's dtype of autocast on {device}", functools.partial(torch.get_autocast_dtype, device)))
    flags.append(("torch's order of bytes in files", torch.serialization.get_default_load_endianness))
    for name, module in list(sys.modules.items()):
        if name.startswith(("torch.backends.", "torch.__future__")) and isinstance(module, types.ModuleType):
            values = vars(getattr(module, "m", module))  # torch wraps modules that have flags
            names = [n for n, v in values.items() if isinstance(v, bool | int | str) and not n.startswith("__")]
            flags += [(f"{name}.{n}", functools.partial(getattr, module, n)) for n in names]
    return flags


def _of_a_library(finder: object) -> bool:
    """Whether a finder of modules is one of a package: packages add theirs when they are imported."""
    kind = finder if isinstance(finder, type) else type(finder)
    return kind.__module__.partition(".")[0] in sys.modules and "site-packages" in str(
        getattr(sys.modules[kind.__module__.partition(".")[0]], "__file__", "")
    )


def _change(name: str, before: object, now: object) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        names = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
        return f"{name} has other values of {', '.join(names[:4])}"
    if isinstance(before, bool | str):
        return f"{name}, which was {_shown(before)}, is {_shown(now)}"
    return f"{name} is another one than before"


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)[:60]
