"""What a run of a candidate leaves behind in torch for everything that runs after it: noticed, and undone.

And the reverse: what the caller has set is about the caller, and no run of a check or a diagnosis is under it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_TINY = 1e-310  # a subnormal; torch's flag is the thread's, under which Python's numbers are as well


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
    """Inside, what torch keeps for a whole process or thread may be set; afterwards it is as it was.

    changed: takes one sentence for each that was left otherwise.
    """
    before = [s.get() for s in _SETTINGS]
    try:
        yield
    finally:
        for setting, was in zip(_SETTINGS, before, strict=True):
            now = setting.get()
            if now != was:
                changed.append(f"torch's {setting.what}, which was {_said(was)}, is {_said(now)}")
                setting.put(was)


def _said(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value).removeprefix("torch.")


@contextmanager
def neutral_state() -> Iterator[None]:
    """Inside, gradients can be asked for whatever mode the caller is in; the caller's random numbers are left alone."""
    state = torch.random.get_rng_state()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.random.set_rng_state(state)


@contextmanager
def threads_set(count: int | None) -> Iterator[None]:
    """Inside, torch has so many threads (None: as it has)."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
