"""What the Engine takes from a file, or measures: the experts of a profile, and the calibration."""

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
    """{layer: experts that stay, most used first} for cache="static"; {} for the others."""
    if asked.cache == "static":
        if profile is None:
            raise ValueError(f"{OP}: cache='static' needs profile=, what Engine.profile() gave or a file of it")
        return profile_of(profile, {n: store.num_experts(n) for n in store.layers})
    if profile is not None:
        raise ValueError(f"{OP}: profile= is for cache='static', and cache={asked.cache!r} reads none")
    return {}


def chosen_calibration(
    store: ExpertStore, asked: Settings, spending: Spending, given: Any, engine: EngineFactory
) -> tuple[Any, Transport | None]:
    """A Calibration, or None where no choice hangs on it

    And what has locked the store's pages for it: locking takes seconds of a large store, so whoever locks them next
    does so while this is held.
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
