"""torch settings around a run: reports and undoes a candidate's changes, and shields it from the caller's modes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

_INTERPRETER = r"triton\.runtime\.interpreter|goldsmith\.assay\.execute\.interpreter"  # modules, as warnings name them
_TINY = 1e-310  # a subnormal; torch's flag is per thread and also affects Python floats


class _Setting(NamedTuple):
    what: str
    get: Callable[[], object]
    put: Callable[[Any], object]


def _default_device(before: torch.device) -> None:
    torch.set_default_device(None if before.type == "cpu" else before)


def _autocast(kind: str) -> _Setting:
    get, put = functools.partial(torch.is_autocast_enabled, kind), functools.partial(torch.set_autocast_enabled, kind)
    return _Setting(f"autocast on {kind}", get, put)


_SETTINGS = (
    _Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("number of threads", torch.get_num_threads, torch.set_num_threads),
    _Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting("default device", torch.get_default_device, _default_device),
    _Setting("deterministic mode", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _Setting("flushing of subnormals", lambda: _TINY * 1.0 == 0.0, torch.set_flush_denormal),
    _Setting("anomaly mode", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    _autocast("cpu"),
    _autocast("cuda"),
)


@contextmanager
def restored_settings(changed: list[str]) -> Iterator[None]:
    """Context that restores torch's settings of the process and the thread afterwards.

    changed: receives one sentence for each setting that was left changed.
    """
    before = [s.get() for s in _SETTINGS]
    try:
        yield
    finally:
        for setting, was in zip(_SETTINGS, before, strict=True):
            now = setting.get()
            if now != was:
                changed.append(f"torch's {setting.what}, which was {_shown(was)}, is {_shown(now)}")
                setting.put(was)


class SeededGenerator:
    """torch's generator of the CPU with this seed, one number after it, so that a return to the seed shows.

    `torch.manual_seed` would format a stack trace each time.
    """

    def __init__(self, seed: int) -> None:
        self.seed = torch.default_generator.manual_seed(seed).initial_seed()
        self.first = torch.default_generator.get_state()
        torch.rand(1, device="cpu")

    def reseeded(self) -> str:
        """A sentence where the generator has another seed now, or was set back to this one; else ""."""
        now = torch.default_generator.initial_seed()
        if now != self.seed:
            return f"torch's random generator, whose seed was {self.seed}, has the seed {now}"
        back = torch.equal(torch.default_generator.get_state(), self.first)
        return f"torch's random generator is back at its seed {now}, so that its numbers come again" if back else ""


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value).removeprefix("torch.")


@contextmanager
def neutral_state(*, quiet: bool = True) -> Iterator[None]:
    """Context that enables gradients in every mode of the caller, and restores the caller's random state.

    quiet: inside, warnings of Triton's interpreter are hidden, and filters of warnings are restored afterwards.
    """
    state = torch.random.get_rng_state()
    try:
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings() if quiet else nullcontext():
            if quiet:
                hide_interpreter_warnings()
            yield
    finally:
        torch.random.set_rng_state(state)


def hide_interpreter_warnings() -> None:
    """A check would show thousands: for each NaN and Inf that the probes feed to a kernel, and for the interpreter's
    own conversions of one-element arrays.
    """
    warnings.filterwarnings("ignore", module=_INTERPRETER)


@contextmanager
def threads_set(count: int | None) -> Iterator[None]:
    """Context in which torch uses `count` threads (None: unchanged)."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
