"""The Engine's inputs that come from a file or a measurement: a profile's experts, and the calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .calibration.calibration import Calibration, kept_or_measured
from .calibration.call_overhead import EngineFactory
from .memory.budget import Spending
from .memory.transport import Transport
from .planning.costs import Costs
from .settings import OP, Settings, profile_of
from .store.expert_store import ExpertStore


def chosen_experts(store: ExpertStore, asked: Settings, profile: Any) -> dict[int, list[int]]:
    """{layer: experts to keep, most used first} for cache="static"; otherwise {}."""
    if asked.cache == "static":
        if profile is None:
            raise ValueError(f"{OP}: cache='static' needs profile=, the result of Engine.profile() or a file of it")
        return profile_of(profile, {n: store.num_experts(n) for n in store.layers})
    if profile is not None:
        raise ValueError(f"{OP}: profile= is only for cache='static', but cache={asked.cache!r}")
    return {}


def chosen_calibration(
    store: ExpertStore, asked: Settings, spending: Spending, given: Any, engine: EngineFactory
) -> tuple[Any, Transport | None]:
    """(a Calibration, or None if no decision depends on it; the Transport that page-locked the store for it, or None)

    Page-locking a large store takes seconds. The caller keeps the Transport until the next user has locked the same
    pages.
    """
    if given is None and (asked.lanes != "auto" or not spending.device_lane):
        return None, None
    if given is not None and not isinstance(given, (str, Path)):
        if not isinstance(getattr(given, "costs", None), Costs):
            raise TypeError(f"{OP}: calibration={given!r}, wanted a Calibration, the path of one, or None")
        return given, None
    if given is not None:
        try:
            return Calibration.load(given), None
        except OSError as error:
            text = f"{OP}: calibration= cannot be read ({error.strerror}); give a Calibration, or a file that one saved"
            raise OSError(error.errno, text, str(given)) from error
    locked = Transport(store, asked.device) if asked.device.type == "cuda" else None
    return kept_or_measured(store, engine, device=asked.device, threads=asked.threads), locked
