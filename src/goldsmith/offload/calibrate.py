"""The constants of the scheduler on this machine, measured once and kept."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core import native
from ..core.device import machine
from ..core.processors import worth
from ..experts.memory import frozen
from .costs import Costs, Curve
from .folder import cache_folder
from .measure import BESIDE, ON_DEVICE, DeviceBench, HostBench
from .others import BUSY, Others, busy
from .overhead import overheads
from .publish import published
from .store import ExpertStore
from .transport import Transport

_OP = "offload.calibrate"
VERSION = 7  # of what is measured and of what the costs mean: an older file is made anew
_CALLS = 0.6  # seconds for the engine's own calls


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found: `plan` takes its `costs`.

    costs      see `Costs`; expert_bytes are those of a block of the store
    key        what it holds for: machine, versions, format, sizes, threads, device
    measured   the numbers that the costs were made of, by name
    transport  in words: how bytes reach the device
    others     share of the processors' time that other programs took meanwhile; None where the system does not say
    """

    costs: Costs
    key: dict[str, Any]
    measured: dict[str, float]
    transport: str
    others: float | None = None

    @property
    def busy(self) -> bool:
        """Whether it was made on a busy machine, whose costs are not those of a quiet one."""
        return (self.others or 0.0) > BUSY

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """JSON; the file is there whole, or as it was. OSError names `path`."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        try:
            with published(Path(path)) as file:
                file.write(text.encode())
        except OSError as error:  # of the temporary file, or of none
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """What `save` wrote. Raises OSError, and ValueError for a file that is none."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            transport, key, measured = content["transport"], content["key"], content["measured"]
            if key.get("version", VERSION) != VERSION:
                raise ValueError(f"it is of version {key['version']}, and this goldsmith measures version {VERSION}")
            if not isinstance(transport, str) or not isinstance(key, dict) or not isinstance(measured, dict):
                raise TypeError("transport, key or measured is not what it should be")
            others = content.get("others")
            return cls(Costs(**content["costs"]), key, measured, transport, None if others is None else float(others))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"Calibration.load: {path} is not a calibration ({error}); make it anew") from None


def calibrate(
    store: ExpertStore, *, device: torch.device | str = "auto", threads: int | None = None, force: bool = False
) -> Calibration:
    """The costs of this store's experts on this machine: measured, or as they were kept

    (Some 4.5 seconds beside an H100; the first time in a process 6 to 22, with what it compiles and imports: the rows
    offload.calibrate of `python -m benchmarks.offload`.)

    The CPU's kernel at 1 to 240 tokens an expert, copies, the device's kernel at 1 to 512, the CPU's kernel with copies
    running, and latencies: all that a call of the engine takes beside a lane's own work, and what one takes at least
    that has experts on the CPU and on the device. Kept as JSON in the cache folder ($GOLDSMITH_CACHE) under version,
    machine, torch, format, sizes, threads and device; a file of another key or a damaged one is made anew, and so is
    any with force=True. One that was made while others used the processors says so (`busy`, and a RuntimeWarning), and
    is made anew as soon as it is asked for on a quiet machine.

    device    "auto" (a GPU if there is one), or a torch.device; on "cpu" copies go from memory to memory and the
              device's kernel is the CPU's
    threads   of the CPU's kernel; None: one less than can run with a GPU, all without
    """
    device = _device_of(device)
    threads = threads or max(1, worth() - (device.type == "cuda"))
    key = _key(store, device, threads)
    path = _path(key)
    if not force:
        try:
            kept = Calibration.load(path)
        except (OSError, ValueError):  # none there, none that may be read, or a damaged one
            kept = None
        if kept is not None and kept.key == key and not (kept.busy and not busy()):
            _warn(kept)
            return kept
    with frozen(), Others() as others:
        found = _measured(store, device, threads, key)
    found = replace(found, others=others.share)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.save(path)
    except OSError as error:
        warnings.warn(
            f"{_OP}: what was measured could not be kept ({error.strerror or error}: {path.parent}), so every start "
            "measures again; GOLDSMITH_CACHE names a folder that can be written to",
            RuntimeWarning,
            stacklevel=2,
        )
    _warn(found)
    return found


def _warn(found: Calibration) -> None:
    if found.busy:
        warnings.warn(
            f"{_OP}: others took {found.others:.0%} of the processors' time while this machine was measured, so the "
            "plan is one for a busy machine; it is measured again when it is quiet, or with force=True",
            RuntimeWarning,
            stacklevel=3,
        )


def _device_of(device: torch.device | str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"{_OP}: device={str(device)!r}, wanted 'auto', 'cpu' or 'cuda:N'")
    return found


def _key(store: ExpertStore, device: torch.device, threads: int) -> dict[str, Any]:
    here, layout = machine(), store.blocks.layout
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    native_level = native.isa() if native.reason() is None else "none"
    return {
        "version": VERSION, "cpu": here.cpu, "isa": native_level, "cores": here.cores, "gpu": gpu,
        "torch": torch.__version__, "format": layout.format, "group_size": layout.group_size,
        "hidden_size": layout.hidden_size, "intermediate_size": layout.intermediate_size,
        "stride": store.blocks.stride, "dtype": str(store.dtype), "activation": store.activation, "threads": threads,
    }  # fmt: skip


def _path(key: dict[str, Any]) -> Path:
    digits = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "calibration" / f"{digits}.json"


def _measured(store: ExpertStore, device: torch.device, threads: int, key: dict[str, Any]) -> Calibration:
    host = HostBench(store, threads, lane=device.type == "cuda")
    try:
        measured: dict[str, float] = {"cpu_latency": host.latency(0.1)}
        cpu = host.curve(0.2)
        measured |= {f"cpu_{n}": seconds for n, seconds in cpu.items()}
        found = (_gpu if device.type == "cuda" else _no_gpu)(store, host, device, measured, cpu)
    finally:
        host.close()
    size, work = float(store.blocks.stride), 6.0 * store.hidden_size * store.intermediate_size
    link, calls, curve = size / measured["copy"], found.calls, _rising(cpu)
    route = calls.get("route", 0.0)
    measured |= {f"call_{way}": seconds for way, seconds in calls.items()}
    (_, one), (n, many), (_, one_there), (m, many_there) = curve[0], curve[-1], found.device[0], found.device[-1]
    costs = Costs(
        expert_bytes=size, flops_per_token=work, cpu_bytes_per_s=size / one, cpu_flops=work * n / many,
        link_bytes_per_s=link, dram_bytes_per_s=max(measured["together"], size / one, link),
        device_bytes_per_s=size / one_there, device_flops=work * m / many_there,
        cpu_latency=measured["cpu_latency"] + calls.get("cpu", 0.0), link_latency=found.link_latency,
        device_latency=found.device_latency, split_latency=calls.get("split", 0.0), shared=device.type == "cpu",
        cpu_curve=_with(curve, route), cpu_beside_curve=_with(found.beside, route),
        device_curve=found.device, **found.link_beside,
    )  # fmt: skip
    return Calibration(costs, key, measured, found.transport)


@dataclass
class _Found:
    """What a device gives to the costs; calls: see `overheads`."""

    device: Curve
    link_latency: float
    device_latency: float
    transport: str
    calls: dict[str, float]
    beside: Curve  # of the CPU, while copies run
    link_beside: dict[str, float]


def _rising(times: Mapping[int, float]) -> Curve:
    """Points (n, seconds) that do not fall, the nearest to these in squares: more tokens take no less time

    Neighbours that fall, which a noisy machine gives, become their mean, until none does.
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
    """Seconds of one of many tokens."""
    return times[max(times)] / max(times)


def _with(curve: Curve, route: float) -> Curve:
    """A curve of the kernel and so many seconds a token."""
    return tuple((n, seconds + n * route) for n, seconds in curve)


def _no_gpu(
    store: ExpertStore, host: HostBench, device: torch.device, measured: dict[str, float], cpu: dict[int, float]
) -> _Found:
    """The device is the CPU, after its own lane: nothing runs beside anything, and nothing goes to and fro."""
    measured["copy"] = measured["copy_pageable"] = host.copy(0.3)
    copier = host.copier(torch.empty(2, store.blocks.stride, dtype=torch.uint8, device="cpu"))
    measured["together"] = _bytes(store, host.together_with(copier, 0.4))
    calls = overheads(store, device, host.threads, _CALLS, cpu[1])
    least = measured["cpu_latency"] + calls.get("cpu", 0.0)  # all that a call on the CPU does is done there as well
    return _Found(
        _rising(cpu), max(0.0, calls.get("link", 0.0) - cpu[1]), max(least, calls.get("device", 0.0) - cpu[1]),
        Transport(store, device).why, calls, (), {},
    )  # fmt: skip


def _gpu(
    store: ExpertStore, host: HostBench, device: torch.device, measured: dict[str, float], cpu: dict[int, float]
) -> _Found:
    bench, size = DeviceBench(store, host, device), store.blocks.stride
    try:
        measured["copy"] = bench.copy(0.25)
        measured["copy_pageable"] = bench.pageable(0.15)
        page = measured["link_latency"] = bench.link_latency(0.1)
        one = measured["device_one"] = bench.kernel(1, 0.2, experts=1)
        calls = {n: bench.kernel(n, 0.15) for n in ON_DEVICE}
        # from one expert to several, what is added is bytes, which memory does not give any faster than to a copy; what
        # a call takes beyond that is the call itself
        more = bench.together - 1
        each = (calls[1] - one) / more if more else one
        measured["device_memory"] = bench.memory(0.05)
        each = max(each, size / measured["device_memory"])
        latency = measured["device_latency"] = max(0.0, min(one - each, calls[1] - bench.together * each))
        curve = {n: max(call - latency, 0.1 * call) / bench.together for n, call in calls.items()}
        measured |= {f"device_{n}": seconds for n, seconds in curve.items()}
        beside = _beside(store, host, bench, measured, cpu)
        bench.give_way()
        spent = overheads(store, device, host.threads, _CALLS, cpu[1], _token(cpu))
        return _Found(
            _rising(curve), max(page, spent.get("link", 0.0) - each), max(latency, spent.get("device", 0.0) - each),
            bench.transport.why, spent, *beside,
        )  # fmt: skip
    finally:
        bench.close()


def _beside(
    store: ExpertStore, host: HostBench, bench: Any, measured: dict[str, float], cpu: dict[int, float]
) -> tuple[Curve, dict[str, float]]:
    """The CPU's curve while copies run, and the rate of copies while it computes

    What an expert takes more is that of a token up to one token, that of a prompt from BESIDE[-1] tokens on, and never
    less for more tokens, between them on a line.
    """
    times = {n: host.together_with(bench.copier(), 0.25, n, cpu[n]) for n in BESIDE if n in cpu}
    measured |= {f"cpu_{n}_beside": seconds for n, (seconds, _) in times.items()}
    measured |= {f"copy_beside_{n}": seconds for n, (_, seconds) in times.items()}
    measured["together"] = _bytes(store, times[1])
    at, extra = zip(*_rising({n: seconds - cpu[n] for n, (seconds, _) in times.items()}), strict=True)
    curve = tuple((n, seconds + max(0.0, float(np.interp(n, at, extra)))) for n, seconds in _rising(cpu))
    copy = sum(seconds for _, seconds in times.values()) / len(times)
    link = store.blocks.stride / max(measured["copy"], copy)
    return curve, {"link_beside_bytes_per_s": link}


def _bytes(store: ExpertStore, seconds: tuple[float, float]) -> float:
    """A second, of experts and copies that take so long side by side."""
    return sum(store.blocks.stride / each for each in seconds)
