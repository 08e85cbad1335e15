"""ProcessState: what all code of a process shares besides functions and torch's settings, and whether calls change it.

Settings that change neither a number nor what other code does, such as how torch prints, are not looked at.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

_COMPILERS = ("CC", "CXX", "CUDA", "MAX_JOBS", "NV", "PYTORCH_", "TORCH", "TRITON_")  # their variables
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGUSR1})  # the harness's own
_UMASK = 0o077


class ProcessState:
    """Compared with the state before the first call of the candidate."""

    def __init__(self) -> None:
        self.before: dict[str, object] = {}
        self.states: dict[str, set[object]] = {}  # that generators had after calls which changed them
        self.given: dict[str, object] = {}

    def begin(self) -> None:
        """Before a call: gives Python's and NumPy's generators states that they never had."""
        if not self.before:
            self.before = dict(_read())
        for name, seed, state in _generators():
            seed(int.from_bytes(os.urandom(4), "little"))
            self.given[name] = state()

    def changed(self) -> list[str]:
        """After a call: sentences about what has changed."""
        sentences = [
            _change(name, self.before[name], now)
            for name, now in _read()
            if name in self.before and now != self.before[name]
        ]
        for name, _, state in _generators():
            now, known = state(), self.states.setdefault(name, set())
            if name in self.given and now != self.given[name]:
                if now in known:  # after numbers were drawn, the state depends on the one before
                    sentences.append(f"{name} has a seed of the candidate's")
                known.add(now)
        return sentences


def _read() -> Iterator[tuple[str, object]]:
    """(what, value) of all that is looked at."""
    with suppress(OSError):  # the folder was removed
        yield "the working folder", os.getcwd()
    yield "the environment", {n: v for n, v in os.environ.items() if not n.startswith(_COMPILERS)}
    for number in _SIGNALS:
        yield f"the handler of {signal.Signals(number).name if number < 32 else number}", signal.getsignal(number)
    mask = os.umask(_UMASK)
    os.umask(mask)
    yield "the mask of file modes", mask
    yield "Python's recursion limit", sys.getrecursionlimit()
    yield "Python's garbage collection", gc.isenabled()
    for name in ("stdin", "stdout", "stderr"):
        yield f"sys.{name}", id(getattr(sys, name))
    yield "sys.meta_path", [id(f) for f in sys.meta_path if not _of_a_library(f)]
    numpy: Any = sys.modules.get("numpy")
    if hasattr(numpy, "geterr"):
        yield "NumPy's treatment of errors", numpy.geterr()
    yield "torch's inference mode", torch.is_inference_mode_enabled()
    yield "torch's precision of float32 products", torch.get_float32_matmul_precision()
    for backend in (torch.backends.cudnn, torch.backends.mkldnn):
        for flag in ("enabled", "allow_tf32"):
            with suppress(AttributeError, RuntimeError):  # torch refuses to read the old flag where the new one is set
                yield f"{backend.__name__}.{flag}", getattr(backend, flag)


def _generators() -> Iterator[tuple[str, Callable[[int], object], Callable[[], object]]]:
    """(what, how to seed it, its state) of the generators that all code shares."""
    yield "Python's random generator", random.seed, random.getstate
    numpy: Any = sys.modules.get("numpy.random")
    if hasattr(numpy, "get_state"):
        yield "NumPy's random generator", numpy.seed, lambda: numpy.get_state()[1].tobytes()


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
