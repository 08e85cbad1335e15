"""The Engine's inputs that come from a file or a measurement: a profile's experts, and the calibration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .calibration.calibration import Calibration, kept_or_measured
from .calibration.call_overhead import EngineFactory
from .memory.budget import Spending
from .memory.transport import Transport
from .planning.costs import Costs
from .settings import OP, EngineSettings, profile_of
from .store.expert_store import ExpertStore


def static_experts(
    store: ExpertStore, settings: EngineSettings, profile: Mapping[str, object] | str | Path | None
) -> dict[int, list[int]]:
    """{layer: experts to keep, most used first} for cache="static"; otherwise {}."""
    if settings.cache == "static":
        if profile is None:
            raise ValueError(
                f"{OP}: cache='static' needs profile=, the result of Engine.profile() or a file that contains it"
            )
        return profile_of(profile, {n: store.num_experts(n) for n in store.layers})
    if profile is not None:
        raise ValueError(f"{OP}: profile= is only for cache='static', but cache={settings.cache!r}")
    return {}


def calibration_for(
    store: ExpertStore,
    settings: EngineSettings,
    spending: Spending,
    calibration: Calibration | str | Path | None,
    engine: EngineFactory,
) -> tuple[Any, Transport | None]:
    """(a Calibration, or None if no decision depends on it; the Transport that page-locked the store for it, or None)

    Page-locking a large store takes seconds. The caller keeps the Transport until the next user has locked the same
    pages.
    """
    if calibration is None and (settings.lanes != "auto" or not spending.device_lane):
        return None, None
    if calibration is not None and not isinstance(calibration, (str, Path)):
        if not isinstance(getattr(calibration, "costs", None), Costs):
            raise TypeError(f"{OP}: calibration={calibration!r}, expected a Calibration, the path of one, or None")
        return calibration, None
    if calibration is not None:
        try:
            return Calibration.load(calibration), None
        except OSError as error:
            text = f"{OP}: calibration= cannot be read ({error.strerror}); give a Calibration, or a file that one saved"
            raise OSError(error.errno, text, str(calibration)) from error
    locked = Transport(store, settings.device) if settings.device.type == "cuda" else None
    return kept_or_measured(store, engine, device=settings.device, threads=settings.threads), locked
