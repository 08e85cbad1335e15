"""Calibration: the scheduler's costs on this machine, measured once and cached."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ...core import native
from ...core.device import machine
from ...core.json_values import parse_json
from ...core.processors import worth
from ...experts.packed.memory import frozen
from ..memory.transport import Transport
from ..observe.processor_load import BUSY, ProcessorLoad, busy
from ..planning.costs import Costs, Curve
from ..store.atomic_file import atomic_write
from ..store.cache_folder import cache_folder
from ..store.expert_store import ExpertStore
from .benches import CONTENDED_TOKENS, ON_DEVICE, DeviceBench, HostBench
from .call_overhead import EngineFactory, overheads

_OP = "offload.calibrate"
VERSION = 7  # of the measurement and the meaning of the costs: files of older versions are measured again
_CALLS = 0.6  # seconds for timing the engine's own calls


@dataclass(frozen=True)
class Calibration:
    """The result of `calibrate`; `plan` takes its `costs`.

    costs      see `Costs`; expert_bytes is the size of a block of the store
    key        what the costs hold for: machine, versions, format, sizes, threads, device
    measured   the measurements behind the costs, by name
    transport  how bytes reach the device, in words
    others     share of the processors' time that other programs took during the measurement; None if unknown
    """

    costs: Costs
    key: dict[str, object]
    measured: dict[str, float]
    transport: str
    others: float | None = None

    @property
    def busy(self) -> bool:
        """Whether the machine was busy during the measurement, so the costs do not hold for a quiet one."""
        return (self.others or 0.0) > BUSY

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON; the file is replaced as a whole or not at all. An OSError names `path`."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        try:
            with atomic_write(Path(path)) as file:
                file.write(text.encode())
        except OSError as error:  # the error names the temporary file, or none
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads a file of `save`. Raises OSError, and ValueError for another kind of file."""
        try:
            content = parse_json(Path(path).read_text(encoding="utf-8"))
            transport, key, measured = content["transport"], content["key"], content["measured"]
            if key.get("version", VERSION) != VERSION:
                raise ValueError(f"it has version {key['version']}, but this goldsmith measures version {VERSION}")
            if not isinstance(transport, str) or not isinstance(key, dict) or not isinstance(measured, dict):
                raise TypeError("transport, key or measured has the wrong type")
            others = content.get("others")
            return cls(Costs(**content["costs"]), key, measured, transport, None if others is None else float(others))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"Calibration.load: {path} is not a calibration ({error}); calibrate again") from None


def kept_or_measured(
    store: ExpertStore, engine: EngineFactory, *, device: torch.device | str = "auto", threads: int | None = None,
    force: bool = False,
) -> Calibration:  # fmt: skip
    """The implementation of `offload.calibrate`; engine: the class Engine, whose calls are timed."""
    device = _device_of(device)
    threads = threads or max(1, worth() - (device.type == "cuda"))
    key = _key(store, device, threads)
    path = _path(key)
    if not force:
        try:
            cached = Calibration.load(path)
        except (OSError, ValueError):  # missing, unreadable or damaged
            cached = None
        if cached is not None and cached.key == key and not (cached.busy and not busy()):
            _warn(cached)
            return cached
    with frozen(), ProcessorLoad() as load:
        calibration = _measured(store, device, threads, key, engine)
    calibration = replace(calibration, others=load.share)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        calibration.save(path)
    except OSError as error:
        warnings.warn(
            f"{_OP}: the calibration could not be saved ({error.strerror or error}: {path.parent}), so every start "
            "measures again; set GOLDSMITH_CACHE to a writable folder",
            RuntimeWarning,
            stacklevel=3,
        )
    _warn(calibration)
    return calibration


def _warn(calibration: Calibration) -> None:
    if calibration.busy and calibration.others is not None:
        warnings.warn(
            f"{_OP}: other programs took {100 * calibration.others:.0f} % of the processors' time while this machine "
            "was measured, so the costs are those of a busy machine; they are measured again when it is quiet, or with "
            "force=True",
            RuntimeWarning,
            stacklevel=4,
        )


def _device_of(device: torch.device | str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parsed = torch.device(device)
    if parsed.type not in ("cpu", "cuda"):
        raise ValueError(f"{_OP}: device={str(device)!r}, expected 'auto', 'cpu' or 'cuda:N'")
    return parsed


def _key(store: ExpertStore, device: torch.device, threads: int) -> dict[str, object]:
    here, layout = machine(), store.blocks.layout
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    native_level = native.isa() if native.reason() is None else "none"
    return {
        "version": VERSION, "cpu": here.cpu, "isa": native_level, "cores": here.cores, "gpu": gpu,
        "torch": torch.__version__, "format": layout.format, "group_size": layout.group_size,
        "hidden_size": layout.hidden_size, "intermediate_size": layout.intermediate_size,
        "stride": store.blocks.stride, "dtype": str(store.dtype), "activation": store.activation, "threads": threads,
    }  # fmt: skip


def _path(key: dict[str, object]) -> Path:
    digits = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "calibration" / f"{digits}.json"


def _measured(
    store: ExpertStore, device: torch.device, threads: int, key: dict[str, object], engine: EngineFactory
) -> Calibration:
    host = HostBench(store, threads, lane=device.type == "cuda")
    try:
        measured: dict[str, float] = {"cpu_latency": host.latency(0.1)}
        cpu = host.curve(0.2)
        measured |= {f"cpu_{n}": seconds for n, seconds in cpu.items()}
        timings = (_gpu if device.type == "cuda" else _no_gpu)(store, host, device, measured, cpu, engine)
    finally:
        host.close()
    size, work = float(store.blocks.stride), 6.0 * store.hidden_size * store.intermediate_size
    link, calls, curve = size / measured["copy"], timings.calls, _rising(cpu)
    route = calls.get("route", 0.0)
    measured |= {f"call_{way}": seconds for way, seconds in calls.items()}
    (_, one), (n, many), (_, one_there), (m, many_there) = curve[0], curve[-1], timings.device[0], timings.device[-1]
    costs = Costs(
        expert_bytes=size, flops_per_token=work, cpu_bytes_per_s=size / one, cpu_flops=work * n / many,
        link_bytes_per_s=link, dram_bytes_per_s=max(measured["together"], size / one, link),
        device_bytes_per_s=size / one_there, device_flops=work * m / many_there,
        cpu_latency=measured["cpu_latency"] + calls.get("cpu", 0.0), link_latency=timings.link_latency,
        device_latency=timings.device_latency, split_latency=calls.get("split", 0.0), shared=device.type == "cpu",
        cpu_curve=_with(curve, route), cpu_beside_curve=_with(timings.cpu_contended, route),
        device_curve=timings.device, **timings.link_contended,
    )  # fmt: skip
    return Calibration(costs, key, measured, timings.transport)


@dataclass
class _DeviceTimings:
    """The part of the costs that depends on the device; calls: see `overheads`."""

    device: Curve
    link_latency: float
    device_latency: float
    transport: str
    calls: dict[str, float]
    cpu_contended: Curve  # of the CPU, while copies run
    link_contended: dict[str, float]


def _rising(times: Mapping[int, float]) -> Curve:
    """Isotonic regression: the non-decreasing points (n, seconds) nearest to these in least squares

    More tokens never take less time, but a noisy machine measures that. Neighbours that decrease become their mean,
    until none is left.
    """
    pools = list[tuple[float, list[int]]]()
    for n, seconds in sorted(times.items()):
        pools.append((seconds, [n]))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (last, some), (before, others) = pools.pop(), pools.pop()
            mean = (last * len(some) + before * len(others)) / (len(some) + len(others))
            pools.append((mean, others + some))
    return tuple((float(n), seconds) for seconds, pool in pools for n in pool)


def _token(times: Mapping[int, float]) -> float:
    """Seconds per token in a call of many tokens."""
    return times[max(times)] / max(times)


def _with(curve: Curve, route: float) -> Curve:
    """The curve plus `route` seconds per token."""
    return tuple((n, seconds + n * route) for n, seconds in curve)


def _no_gpu(
    store: ExpertStore, host: HostBench, device: torch.device, measured: dict[str, float], cpu: dict[int, float],
    engine: EngineFactory,
) -> _DeviceTimings:  # fmt: skip
    """The device is the CPU itself, after its own lane: nothing runs in parallel, and no transfers are needed."""
    measured["copy"] = measured["copy_pageable"] = host.copy(0.3)
    copier = host.copier(torch.empty(2, store.blocks.stride, dtype=torch.uint8, device="cpu"))
    measured["together"] = _bytes(store, host.together_with(copier, 0.4))
    calls = overheads(store, engine, device, host.threads, _CALLS, cpu[1])
    least = measured["cpu_latency"] + calls.get(
        "cpu", 0.0
    )  # a call on the device includes all work of a call on the CPU
    return _DeviceTimings(
        _rising(cpu), max(0.0, calls.get("link", 0.0) - cpu[1]), max(least, calls.get("device", 0.0) - cpu[1]),
        Transport(store, device).why, calls, (), {},
    )  # fmt: skip


def _gpu(
    store: ExpertStore, host: HostBench, device: torch.device, measured: dict[str, float], cpu: dict[int, float],
    engine: EngineFactory,
) -> _DeviceTimings:  # fmt: skip
    bench, size = DeviceBench(store, host, device), store.blocks.stride
    try:
        measured["copy"] = bench.copy(0.25)
        measured["copy_pageable"] = bench.pageable(0.15)
        page = measured["link_latency"] = bench.link_latency(0.1)
        one = measured["device_one"] = bench.kernel(1, 0.2, experts=1)
        calls = {n: bench.kernel(n, 0.15) for n in ON_DEVICE}
        # each further expert adds bytes, which memory cannot deliver faster than to a copy; the rest is the call's
        # latency
        more = bench.together - 1
        each = (calls[1] - one) / more if more else one
        measured["device_memory"] = bench.memory(0.05)
        each = max(each, size / measured["device_memory"])
        latency = measured["device_latency"] = max(0.0, min(one - each, calls[1] - bench.together * each))
        curve = {n: max(call - latency, 0.1 * call) / bench.together for n, call in calls.items()}
        measured |= {f"device_{n}": seconds for n, seconds in curve.items()}
        cpu_contended = _contention(store, host, bench, measured, cpu)
        bench.free_arena()
        spent = overheads(store, engine, device, host.threads, _CALLS, cpu[1], _token(cpu))
        return _DeviceTimings(
            _rising(curve), max(page, spent.get("link", 0.0) - each), max(latency, spent.get("device", 0.0) - each),
            bench.transport.why, spent, *cpu_contended,
        )  # fmt: skip
    finally:
        bench.close()


def _contention(
    store: ExpertStore, host: HostBench, bench: DeviceBench, measured: dict[str, float], cpu: dict[int, float]
) -> tuple[Curve, dict[str, float]]:
    """The CPU's curve while copies run, and the rate of copies while the CPU computes

    The extra time per expert is measured at the token counts of CONTENDED_TOKENS and interpolated linearly between
    them. It is constant outside, and never decreases with more tokens.
    """
    times = {n: host.together_with(bench.copier(), 0.25, n, cpu[n]) for n in CONTENDED_TOKENS if n in cpu}
    measured |= {f"cpu_{n}_beside": seconds for n, (seconds, _) in times.items()}
    measured |= {f"copy_beside_{n}": seconds for n, (_, seconds) in times.items()}
    measured["together"] = _bytes(store, times[1])
    at, extra = zip(*_rising({n: seconds - cpu[n] for n, (seconds, _) in times.items()}), strict=True)
    curve = tuple((n, seconds + max(0.0, float(np.interp(n, at, extra)))) for n, seconds in _rising(cpu))
    copy = sum(seconds for _, seconds in times.values()) / len(times)
    link = store.blocks.stride / max(measured["copy"], copy)
    return curve, {"link_beside_bytes_per_s": link}


def _bytes(store: ExpertStore, seconds: tuple[float, float]) -> float:
    """Bytes per second of experts and copies that take these seconds side by side."""
    return sum(store.blocks.stride / each for each in seconds)
